"""Dashboard and alerts against the metrics of a real server, and against a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.completions import TEXT, at_once, completion
from tests.support.rules.promql import (
    DASHBOARD,
    DEPLOY,
    alert_expressions,
    dashboard_expressions,
    dashboard_panels,
    groupings_of,
    metrics_of,
    without_variables,
)
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

TARGET_LABELS = {"instance", "job"}  # Prometheus's own
EXPRESSIONS = [*dashboard_expressions(), *alert_expressions()]


@pytest.fixture(scope="module")
def samples(server: Server) -> dict[str, dict[str, set[str]]]:
    """Each metric's labels, with the values that they have."""
    completion(server, prompt=TEXT)
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(httpx.get(server.base_url + "/metrics").text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_expressions_name_what_the_server_exports(
    samples: dict[str, dict[str, set[str]]], where: str, expression: str
) -> None:
    labels = set(TARGET_LABELS)
    for named in metrics_of(expression):
        assert named.metric in samples, named.metric
        labels |= samples[named.metric].keys()
        for label, operator, value in named.matchers:
            assert label in samples[named.metric].keys() | TARGET_LABELS, label
            if operator == "=" and label in ("finished_reason", "status") and not value.isdigit():
                assert value in samples[named.metric][label]
    assert groupings_of(expression) <= labels


def test_legends_and_variables_name_labels(samples: dict[str, dict[str, set[str]]]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard_panels():
        for target in panel.get("targets", ()):
            labels = set(TARGET_LABELS)
            for named in metrics_of(target["expr"]):
                labels |= samples[named.metric].keys()
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
    for variable in dashboard["templating"]["list"]:
        for metric, label in re.findall(r"label_values\((moeserve:\w+)[^,]*, (\w+)\)", variable["query"]):
            assert label in samples[metric].keys() | TARGET_LABELS


def test_alerts_tell_of_labels_that_they_have(samples: dict[str, dict[str, set[str]]]) -> None:
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            labels = set(TARGET_LABELS)
            for named in metrics_of(rule["expr"]):
                labels |= samples[named.metric].keys()
            said = " ".join(rule["annotations"].values())
            assert set(re.findall(r"\$labels\.(\w+)", said)) <= labels


# ---------------------------------------------------------------- a real Prometheus


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[str]:
    """Its URL. It runs with our configuration and rules, but scrapes the test's server every half second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.base_url.removeprefix("http://")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([binary, *arguments, f"--web.listen-address={address}"], stderr=log)
    try:
        assert within(30, lambda: _is_ready(f"http://{address}")), (tmp_path / "log").read_text()
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(prometheus: str, expression: str) -> list[Any]:
    answer = httpx.get(prometheus + "/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", answer
    result: list[Any] = answer["data"]["result"]
    return result


@pytest.mark.slow
def test_every_panel_shows_something(server: Server, prometheus: str) -> None:
    for _ in range(6):
        at_once(lambda _: completion(server, prompt=TEXT * 3, max_tokens=32), range(3))
        time.sleep(1)
    for panel, expression in dashboard_expressions():
        result = query(prometheus, without_variables(expression))
        assert result, f"{panel}: {expression}"
        assert all(one["value"][1] != "NaN" for one in result), f"{panel}: {expression}"
    firing = httpx.get(prometheus + "/api/v1/alerts").json()["data"]["alerts"]
    assert firing == []
