"""Whatever a template does with whatever an event holds: memory and output are bounded, by every filter and tag.

The templates are rendered in a process of their own whose memory is limited: one without bounds would not get it.
"""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import FieldError
from tidegate.model.liquid_environment import environment
from tidegate.model.template import MAX_OUTPUT, compile_template
from tidegate.model.trigger_terms import TemplateError
from tidegate.model.work_limit import TooMuchWork, WorkLeft

# As large as an event may be, of each kind.
PAYLOAD: dict[str, Any] = {
    "text": "ab &<\n" * 40_000,
    "blanks": " " * 250_000,
    "short": "ab",
    "n": 10**9,
    "big": 2**63 - 1,
    "f": 1e308,
    "list": list(range(40_000)),
    "words": ["word"] * 30_000,
    "objects": [{"a": n, "b": "x"} for n in range(8_000)],
    "nested": [[["x"] * 20] * 20] * 20,
    "none": None,
    "yes": True,
}
# Several times what the event itself takes; a template without bounds takes gigabytes.
MORE_BYTES = 128 << 20

ARGUMENTS = ["", ": event.payload.text", ": event.payload.n", ": 'a', event.payload.text"]
LEFTS = [f"event.payload.{name}" for name in PAYLOAD]
FILTERED = ["event.payload.text", "event.payload.big", "event.payload.list", "event.payload.objects"]
TAGS = {
    "for": "{% for i in LEFT %}{{ i }}{% endfor %}",
    "for-reversed": "{% for i in LEFT reversed %}{% for j in LEFT reversed %}{{ j }}{% endfor %}{% endfor %}",
    "range": "{% for i in (1..LEFT) %}{% endfor %}",
    "range-reversed": "{% for i in (1..LEFT) reversed %}{% endfor %}",
    "range-limit": "{% for i in (1..LEFT) limit: LEFT offset: LEFT %}{% endfor %}",
    "tablerow": "{% tablerow i in LEFT cols: LEFT %}{{ i }}{% endtablerow %}",
    "tablerow-range": "{% tablerow i in (1..LEFT) cols: 2 %}{% for j in (1..LEFT) %}{% endfor %}{% endtablerow %}",
    "capture": "{% for i in (1..40) %}{% capture a %}{{ a }}{{ a }}{{ LEFT }}{% endcapture %}{% endfor %}{{ a }}",
    "assign": "{% assign a = LEFT %}{% for i in (1..40) %}{% assign a = a | append: a %}{% endfor %}{{ a | size }}",
    "assign-list": "{% assign a = LEFT %}{% for i in (1..40) %}{% assign a = a | concat: a %}{% endfor %}{{ a }}",
    "cycle": "{% for i in (1..9999) %}{% cycle LEFT, i, 'x' %}{% endfor %}",
    "increment": "{% for i in (1..9999) %}{% increment a %}{% decrement b %}{% endfor %}",
    "case": "{% for i in (1..9999) %}{% case LEFT %}{% when LEFT %}{{ LEFT }}{% endcase %}{% endfor %}",
    "if": "{% for i in (1..9999) %}{% if LEFT == LEFT or LEFT contains LEFT %}x{% endif %}{% endfor %}",
    "unless": "{% for i in (1..9999) %}{% unless LEFT == LEFT %}x{% endunless %}{% endfor %}",
    "ifchanged": "{% for i in (1..9999) %}{% ifchanged %}{{ LEFT }}{% endifchanged %}{% endfor %}",
    "break": "{% for i in (1..LEFT) %}{% if i == 9 %}{% break %}{% endif %}{% continue %}{% endfor %}",
    "echo": "{% for i in (1..9999) %}{% echo LEFT %}{% endfor %}",
    "liquid": "{% liquid\nfor i in (1..9999)\n echo LEFT\nendfor\n%}",
    "comment": "{% comment %}{% for i in (1..9999) %}{% endfor %}{% endcomment %}{{ LEFT }}",
    "raw": "{% raw %}{{ LEFT }}{% endraw %}{{ LEFT }}",
    "doc": "{% doc %}LEFT{% enddoc %}{{ LEFT }}",
}


def sources() -> Iterator[str]:
    """Each filter many times over, on everything, with everything; and each tag."""
    for name, argument, left in itertools.product(sorted(environment.filters), ARGUMENTS, FILTERED):
        again = "{% assign a = a | " + name + argument + " %}"
        yield "{% assign a = " + left + " %}{% for i in (1..30) %}" + again + "{% endfor %} {{ a }}"
    for tag, left in itertools.product(TAGS.values(), LEFTS):
        yield tag.replace("LEFT", left)


def fault(source: str) -> str | None:
    """What a template does that it must not; None when it is bounded or refused."""
    render = compile_template(source, "t", [])
    if render is None:
        return None
    try:
        found = render({"payload": PAYLOAD}, WorkLeft())
    except (TemplateError, TooMuchWork) as exc:
        return "takes more memory than it may" if isinstance(exc.__cause__, MemoryError) else None
    return "makes a text that is too long" if len(found.encode()) > MAX_OUTPUT else None


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
    tried = 0
    for source in sources():
        tried += 1
        if told := fault(source):
            print(f"{source[:200]} {told}")
    print(f"tried {tried}")


def test_every_filter_and_tag_is_bounded() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("tried "), done.stderr[-2000:]
    assert lines[:-1] == []
    assert int(lines[-1].split()[1]) > 500


def test_every_tag_is_tried() -> None:
    names = {name for name in environment.tags if name.isalpha() and name not in ("content", "illegal", "output")}
    assert {name for name in names if not any(f"% {name}" in tag for tag in TAGS.values())} == set()


@pytest.mark.parametrize("stop", [50_002, 10**9, 10**30])
def test_a_loop_that_no_event_could_end_is_refused_on_save(stop: int) -> None:
    text, errors = f"{{% for i in (1..{stop}) %}}{{% endfor %}}", list[FieldError]()
    assert compile_template(text, "idempotency_key", []) is None
    compile_template({"a": text}, "parameter_template", errors)
    assert len(errors) == 1 and errors[0].field == "parameter_template.a" and "work limit" in errors[0].message


def test_ordinary_sums_work() -> None:
    render = compile_template("{{ event.payload.big | times: event.payload.big }}", "t", [])
    assert render is not None
    assert render({"payload": {"big": 2**40}}) == 2**80


if __name__ == "__main__":
    main()
