"""deploy/replicas/: what can be checked of it without Docker and Kubernetes."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import yaml

from moeserve.config import ServerConfig, env_name
from moeserve.httpserver.app import Application
from moeserve.httpserver.observability.metrics import Metrics
from tests.support.rules.promql import DEPLOY

FOLDER = DEPLOY / "replicas"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
ADAPTER = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())
VARIABLES = {env_name(option.name) for option in dataclasses.fields(ServerConfig)}


def found(kind: str, name: str) -> dict[str, Any]:
    (one,) = [o["spec"] for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    spec: dict[str, Any] = one
    return spec


def server_pod() -> dict[str, Any]:
    pod: dict[str, Any] = found("Deployment", "replica")["template"]["spec"]
    return pod


def test_variables_are_ours_and_a_drain_has_its_time() -> None:
    pod = server_pod()
    given = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    servers = [service for name, service in COMPOSE["services"].items() if name.startswith("moeserve")]
    assert len(servers) == 3
    graces = [(given, pod["terminationGracePeriodSeconds"])]
    graces += [(one["environment"], int(one["stop_grace_period"].rstrip("s"))) for one in servers]
    for variables, grace in graces:
        assert set(variables) <= VARIABLES
        assert (
            float(variables["MOESERVE_DRAIN_DELAY"]) + float(variables["MOESERVE_SHUTDOWN_TIMEOUT"]) < grace
        )


def test_readiness_goes_off_before_the_drain() -> None:
    (container,) = server_pod()["containers"]
    paths = Application().paths
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    readiness = container["readinessProbe"]
    delay = next(float(one["value"]) for one in container["env"] if one["name"] == "MOESERVE_DRAIN_DELAY")
    assert readiness["httpGet"]["path"] == "/health/ready"
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < delay
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"


def test_the_gateway_finds_the_servers() -> None:
    labels = found("Deployment", "replica")["template"]["metadata"]["labels"]
    for kind in ("PodDisruptionBudget", "Deployment"):
        assert found(kind, "replica")["selector"]["matchLabels"] == labels
    (container,) = found("Deployment", "gateway")["template"]["spec"]["containers"]
    ((name, value),) = labels.items()
    assert container["args"][container["args"].index("--selector") + 1] == f"{name}={value}"
    arguments = COMPOSE["services"]["gateway"]["command"]
    urls = arguments[arguments.index("--worker-urls") + 1 :]
    assert urls == [f"http://{name}:8000" for name in COMPOSE["services"] if name != "gateway"]


def test_scaling_reads_metrics_that_there_are() -> None:
    exposition = Metrics("model").render()[0].decode()
    rules = {rule["name"]["as"]: rule for rule in ADAPTER["rules"]["custom"]}
    wanted = {
        metric["pods"]["metric"]["name"] for metric in found("HorizontalPodAutoscaler", "replica")["metrics"]
    }
    assert wanted == set(rules)
    for rule in rules.values():
        series = rule["seriesQuery"].split("{")[0]
        assert f"# TYPE {series} gauge" in exposition
        assert series in rule["metricsQuery"]


def test_ray_serve_is_given_options_that_there_are() -> None:
    """Read from the source: Ray is not installed here."""
    tree = ast.parse((FOLDER / "ray_serve.py").read_text())
    (options,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options"]
    declared = (line.target for line in options.body if isinstance(line, ast.AnnAssign))
    fields = {target.id for target in declared if isinstance(target, ast.Name)}
    (application,) = yaml.safe_load((FOLDER / "ray_serve.yaml").read_text())["applications"]
    assert set(application["args"]) <= fields
    module, _, name = application["import_path"].partition(":")
    assert (FOLDER / f"{module}.py").exists()
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
