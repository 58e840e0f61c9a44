"""The manifests fit the schemas of Kubernetes and each other, and name files, settings, ports, metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.house.test_deploy import CLOSING_SECONDS, DEPLOY, ROOT, SETTINGS, is_checked, of, variables
from tests.house.test_operations import SERIES
from tidegate import __version__
from tidegate.cli import cli
from tidegate.cli.load import load_app
from tidegate.settings import Settings, from_sources

KUBERNETES = DEPLOY / "kubernetes"
# The first version of Kubernetes that is checked, and the last that the validator knows.
VERSIONS = ("1.30", "1.32", kubernetes_validate.latest_version())


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(KUBERNETES.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            yield f"{file.relative_to(KUBERNETES)} {document.get('kind', 'values')}", document


DOCUMENTS = dict(documents())
# Defaults of Postgres: max_connections, superuser_reserved_connections.
POSTGRES_CONNECTIONS, RESERVED_CONNECTIONS = 100, 3
OWN_KINDS = {"Kustomization", "Component", "PodMonitor", "values"}  # not of Kubernetes itself


def is_valid(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.split()[1] not in OWN_KINDS])
def test_a_document_fits_the_schema(name: str) -> None:
    patched = "mount-app" in name or "separate-roles" in name
    document = json.loads(json.dumps(DOCUMENTS[name]))
    if patched:  # a patch has only what it changes
        document["spec"] |= {"selector": {}}
        document["spec"]["template"]["spec"]["containers"][0]["image"] = "tidegate"
        document["spec"]["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    is_valid(document)
    with pytest.raises(kubernetes_validate.ValidationError):
        is_valid(document | {"nonsense": 1})


def test_kustomizations_name_what_exists() -> None:
    listed: set[Path] = set()
    folders = {"base": "Kustomization", "example": "Kustomization", "separate-roles": "Component"}
    for folder, kind in folders.items():
        found = DOCUMENTS[f"{folder}/kustomization.yaml {kind}"]
        named = [*found.get("resources", []), *(patch["path"] for patch in found.get("patches", []) if "path" in patch)]
        named += [file for one in found.get("configMapGenerator", []) for file in one["files"]]
        for path in named:
            assert (KUBERNETES / folder / path).exists(), path
            listed.add((KUBERNETES / folder / path).resolve())
    there = {file.resolve() for folder in folders for file in (KUBERNETES / folder).iterdir()}
    assert {file for file in there - listed if file.name not in ("kustomization.yaml", "__pycache__")} == set()


def test_the_application_of_the_example_can_be_loaded() -> None:
    assert set(load_app(str(KUBERNETES / "example" / "app.py")).workflows) == {"fulfil"}


def built(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
def test_a_role_of_its_own_for_the_migration(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    chosen = tmp_path / "kubernetes" / "example" / "kustomization.yaml"
    text = chosen.read_text()
    assert text.count("# components: [../separate-roles]") == 1
    chosen.write_text(text.replace("# components:", "components:"))
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for document in built(chosen.parent)
        if "template" in document.get("spec", {})
    }
    secrets = {
        name: next(volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "secrets")
        for name, pod in pods.items()
    }
    assert secrets == {"tidegate-api": "tidegate", "tidegate-worker": "tidegate", "tidegate-migrate": "tidegate-owner"}
    container = pods["tidegate-migrate"]["containers"][0]
    assert container["args"] == ["migrate", "--grant-to", "tidegate_app"] and len(container["volumeMounts"]) == 2
    # What is empty is as if it were not set, also beside the settings of all pods.
    emptied = {one["name"]: one["value"] for one in container["env"]}
    assert from_sources(emptied, Path("absent.toml"), {}) == Settings() and emptied.keys() <= SETTINGS


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
def test_an_upgrade_applies_the_job_alone_before_the_rest() -> None:
    commands = (ROOT / "docs" / "upgrading.md").read_text().split("\n### Kubernetes\n")[1].split("```")[1].splitlines()
    applied = [line for line in commands if line.startswith("kubectl apply -k deploy/kubernetes/example")]
    label, value = applied[0].rpartition(" -l ")[2].split("=")
    chosen = [one for one in built(KUBERNETES / "example") if one["metadata"].get("labels", {}).get(label) == value]
    assert [one["kind"] for one in chosen] == ["Job"] and len(applied) == 2
    name = chosen[0]["metadata"]["name"]
    deleted, waited = (
        next(n for n, line in enumerate(commands) if part in line)
        for part in (f"delete job {name}", f"wait --for=condition=complete job/{name}")
    )
    assert deleted < commands.index(applied[0]) < waited < commands.index(applied[1])


def test_a_long_migration_is_not_ended() -> None:
    assert "activeDeadlineSeconds" not in DOCUMENTS["base/migrate.yaml Job"]["spec"]


def test_the_ingress_controller_removes_what_clients_say_of_addresses() -> None:
    assert DOCUMENTS["ingress-nginx.yaml values"] == {"controller": {"proxySetHeaders": {"Forwarded": ""}}}
    assert "../ingress-nginx.yaml" in (KUBERNETES / "example" / "ingress.yaml").read_text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
def test_the_example_can_be_built() -> None:
    found = built(KUBERNETES / "example")
    for document in found:
        is_valid(document)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "tidegate"
    kinds = {(document["kind"], document["metadata"]["name"].split("-")[-1]) for document in found}
    assert {("Deployment", "api"), ("Deployment", "worker"), ("Job", "migrate"), ("Service", "api")} <= kinds
    pods = [document["spec"]["template"]["spec"] for document in found if "template" in document.get("spec", {})]
    assert [pod["containers"][0]["image"] for pod in pods] == [f"registry.example.com/tidegate:{__version__}"] * 3
    replicas = {doc["metadata"]["name"]: doc["spec"].get("replicas") for doc in found if doc["kind"] == "Deployment"}
    assert replicas == {"tidegate-api": 2, "tidegate-worker": None}  # the number of workers is the autoscaler's
    worker = next(pod for pod in pods if pod["containers"][0]["name"] == "worker")
    mounted = next(volume for volume in worker["volumes"] if volume["name"] == "app")
    generated = {document["metadata"]["name"] for document in found if document["kind"] == "ConfigMap"}
    assert mounted["configMap"]["name"] in generated and len(worker["volumes"]) == 3


PODS = {
    name.split("/")[1].split(".")[0]: document["spec"]["template"]["spec"]
    for name, document in DOCUMENTS.items()
    if name.startswith("base/") and name.split()[1] in ("Deployment", "Job")
}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_what_the_image_and_a_restricted_namespace_ask_for(name: str) -> None:
    pod, container = PODS[name], PODS[name]["containers"][0]
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == of("USER")[0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["args"][0] in cli.list_commands(None)  # type: ignore[arg-type]
    assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    secret = DOCUMENTS["example/secret.yaml Secret"]
    settings = DOCUMENTS["base/settings.yaml ConfigMap"]["data"]
    for variable in (key for key in settings if key.endswith("_FILE")):
        folder, _, key = settings[variable].rpartition("/")
        assert folder == mounts["secrets"] and key in secret["stringData"]
    assert pod["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]


def test_probes_are_at_the_ports_that_processes_have() -> None:
    settings = DOCUMENTS["base/settings.yaml ConfigMap"]["data"]
    is_checked(settings)
    for name, variable in (("api", "TIDEGATE_PORT"), ("worker", "TIDEGATE_METRICS_PORT")):
        container = PODS[name]["containers"][0]
        port = container["ports"][0]
        assert str(port["containerPort"]) == settings[variable] == variables()[variable]
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
        assert {probe["port"] for probe in probes.values()} == {port["name"]}
        assert (probes["startup"]["path"], probes["readiness"]["path"]) == ("/livez", "/readyz")
        assert probes["liveness"]["path"] == "/livez"  # not /readyz: without a database, restarts do not help
    stop = PODS["worker"]["terminationGracePeriodSeconds"]
    assert stop >= int(settings["TIDEGATE_SHUTDOWN_MS"]) / 1000 + CLOSING_SECONDS
    wait = int(PODS["api"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert PODS["api"]["terminationGracePeriodSeconds"] >= wait + 10 + CLOSING_SECONDS


def test_selectors_and_names_fit_together() -> None:
    for name in ("api", "worker"):
        deployment = DOCUMENTS[f"base/{name}.yaml Deployment"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        budget = DOCUMENTS[f"base/{name}.yaml PodDisruptionBudget"]["spec"]
        assert budget["selector"]["matchLabels"] == labels and budget["maxUnavailable"] < deployment["spec"]["replicas"]
    service = DOCUMENTS["base/api.yaml Service"]
    assert service["spec"]["selector"] == DOCUMENTS["base/api.yaml Deployment"]["spec"]["selector"]["matchLabels"]
    backend = DOCUMENTS["example/ingress.yaml Ingress"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["name"] == service["spec"]["ports"][0]["name"]
    # With service links, a Service sets <NAME>_PORT: none may set a setting.
    links = {f"{document['metadata']['name'].upper().replace('-', '_')}_PORT" for document in [service]}
    assert not links & SETTINGS


def test_workers_are_scaled_by_a_metric_that_exists() -> None:
    scaler = DOCUMENTS["example/autoscaler.yaml HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == DOCUMENTS["base/worker.yaml Deployment"]["metadata"]["name"]
    external = scaler["metrics"][0]["external"]
    metric = external["metric"]
    rule = DOCUMENTS["prometheus-adapter.yaml values"]["rules"]["external"][0]
    assert metric["name"] == rule["name"]["matches"] == rule["seriesQuery"].partition("{")[0] in SERIES
    [chosen] = metric["selector"]["matchExpressions"]
    assert chosen["key"] in SERIES[metric["name"]] and set(chosen["values"]) <= {"ingress", "triggers", "runs"}
    # The age of the oldest is of the cluster, not of a worker: it is not divided by their number.
    assert external["target"]["type"] == "Value"


def test_the_pods_fit_the_connections_of_a_default_postgres() -> None:
    scaler = DOCUMENTS["example/autoscaler.yaml HorizontalPodAutoscaler"]["spec"]
    used = 0
    for name, pods, size in (
        ("api", DOCUMENTS["base/api.yaml Deployment"]["spec"]["replicas"], Settings().serve_connections),
        ("worker", scaler["maxReplicas"], Settings().worker_connections),
    ):
        used += (
            pods + DOCUMENTS[f"base/{name}.yaml Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
        ) * size
    assert used == 87 and used + 1 + RESERVED_CONNECTIONS <= POSTGRES_CONNECTIONS  # 1: the migration
    for file in (KUBERNETES / "example" / "autoscaler.yaml", ROOT / "docs" / "deploy.md"):
        assert str(used) in file.read_text(), file


def test_the_jobs_have_the_names_that_the_alerts_ask_for() -> None:
    monitor = DOCUMENTS["prometheus-operator.yaml PodMonitor"]["spec"]
    ports = {PODS[name]["containers"][0]["ports"][0]["name"]: f"tidegate-{name}" for name in ("api", "worker")}
    jobs = {
        endpoint["port"]: [one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "job"]
        for endpoint in monitor["podMetricsEndpoints"]
    }
    assert jobs == {port: [job] for port, job in ports.items()}
    static = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert {one["job_name"] for one in static} == set(ports.values())
    asked = set(re.findall(r'absent\(up\{job="([\w-]+)"\}\)', (DEPLOY / "prometheus" / "rules.yml").read_text()))
    assert asked == set(ports.values())


def test_the_rules_become_a_prometheus_rule_as_documented() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    command = re.search(r"\{ printf 'apiVersion: monitoring.*?\| kubectl apply -f -", text, re.DOTALL)
    assert command is not None
    shell = command[0].removesuffix("| kubectl apply -f -")
    made = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rule = yaml.safe_load(made)
    assert (rule["kind"], rule["metadata"]["namespace"]) == ("PrometheusRule", "tidegate")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
