"""deploy/: what can be checked of it without Docker, systemd and Grafana at work."""

from __future__ import annotations

import dataclasses
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeserve.config import ServerConfig, env_name
from tests.support.rules.promql import (
    DASHBOARD,
    DEPLOY,
    dashboard_expressions,
    dashboard_panels,
    without_variables,
)

REPOSITORY = DEPLOY.parent
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
VARIABLES = {env_name(option.name) for option in dataclasses.fields(ServerConfig)}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---------------------------------------------------------------- Prometheus and Grafana


def test_prometheus_takes_its_configuration() -> None:
    run(tool("promtool"), "check", "config", "prometheus.yml", cwd=DEPLOY / "prometheus")


def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in run(tool("promtool"), "test", "rules", "alerts_test.yml", cwd=DEPLOY / "prometheus")


def test_dashboard_expressions_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{index}", "expr": without_variables(expression)}
        for index, (_, expression) in enumerate(dashboard_expressions())
    ]
    assert len(rules) > 30
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", str(file))


def test_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = list(dashboard_panels())
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not taken & cells, f"{panel['title']} lies upon another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used == variables


def test_grafana_finds_what_is_provisioned() -> None:
    volumes = dict(volume.rsplit(":ro")[0].split(":") for volume in COMPOSE["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/moeserve.yml").read_text())
    assert volumes["./grafana/dashboards"] == provider["providers"][0]["options"]["path"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


# ---------------------------------------------------------------- containers


def test_compose_names_what_is_there() -> None:
    services = COMPOSE["services"]
    assert services.keys() == {"moeserve", "prometheus", "grafana"}
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).is_dir(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], source
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), "open to this machine only"
    build = services["moeserve"]["build"]
    assert (DEPLOY / build["context"]).resolve() == REPOSITORY
    assert (REPOSITORY / build["dockerfile"]).is_file()
    ours = {name for name in services["moeserve"]["environment"] if name.startswith("MOESERVE_")}
    assert ours <= VARIABLES
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", services[name]["image"]), "a pinned version"


def test_prometheus_scrapes_the_service() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["moeserve:8000"]
    assert COMPOSE["services"]["moeserve"]["ports"] == ["127.0.0.1:8000:8000"]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each of the Dockerfile's stages by its name; "": of the last one, which has none."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            found[rest.partition(" AS ")[2]] = []
        if found:  # else it is an argument of all stages
            found[list(found)[-1]].append((name, rest))
    return found


def test_an_image_can_be_built_from_mirrors() -> None:
    assert instructions()[0] == ("ARG", "PYTHON_IMAGE=python:3.12-slim-bookworm")
    bases = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert bases == ["$PYTHON_IMAGE", "$PYTHON_IMAGE", "runtime", "runtime"]
    build = stages()["build"]
    first_pip = next(number for number, (name, rest) in enumerate(build) if name == "RUN" and "pip" in rest)
    arguments = [rest.partition("=")[0] for name, rest in build[:first_pip] if name == "ARG"]
    assert arguments == ["TORCH_INDEX", "PIP_INDEX_URL"]


def test_dockerfile_has_no_root_and_a_compiler_for_cuda_alone() -> None:
    names = {name for name, _ in instructions()}
    assert names <= {
        *("FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT")
    }
    found = stages()
    assert list(found) == ["build", "runtime", "cuda", ""]
    assert found[""] == [("FROM", "runtime")], "what a build without --target makes"
    runtime = found["runtime"]
    assert runtime[-1][0] == "ENTRYPOINT"
    assert [rest for name, rest in runtime if name == "USER"] == ["10001"], "a number, for runAsNonRoot"
    assert not any("apt-get" in rest for _, rest in runtime), "no compiler in the CPU's image"
    assert found["cuda"][0] == ("FROM", "runtime AS cuda")
    assert [rest for name, rest in found["cuda"] if name == "USER"] == ["root", "10001"]
    used = set(re.findall(r"MOESERVE_\w+", (DEPLOY / "Dockerfile").read_text()))
    assert used <= VARIABLES


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def test_the_health_check_asks_past_proxies() -> None:
    """Docker's client can set proxies in each container. Once the server is gone the check fails."""
    runtime = stages()["runtime"]
    (check,) = (rest for name, rest in runtime if name == "HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("[") :])
    assert program == "python"
    with http.server.HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"http_proxy": "http://127.0.0.1:9", "MOESERVE_HEALTH_PORT": str(server.server_port)}
        healthy = subprocess.run([sys.executable, *arguments], env=environment, timeout=60)
        server.shutdown()
    lost = subprocess.run([sys.executable, *arguments], env=environment, timeout=60, capture_output=True)
    assert (healthy.returncode, lost.returncode) == (0, 1)


def test_the_image_has_a_home_for_any_user() -> None:
    """Models by name are kept in it; without HOME and USER a number without a name would have none."""
    runtime = stages()["runtime"]
    (variables,) = (
        dict(pair.split("=", 1) for pair in rest.split()) for name, rest in runtime if name == "ENV"
    )
    assert variables["USER"]
    (made,) = (rest for name, rest in runtime if name == "RUN")
    assert re.search(rf"install --directory .*--mode=1777 {variables['HOME']}$", made)


def test_the_image_is_built_from_all_that_a_build_needs() -> None:
    """COPY takes what .dockerignore lets through, and that is what pyproject.toml names."""
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied == let_through
    assert all((REPOSITORY / source).exists() for source in copied)
    assert copied >= {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "moeserve"}


def test_the_requirements_layer_names_every_dependency() -> None:
    (step,) = (rest for name, rest in instructions() if name == "RUN" and "tomllib" in rest)
    program = re.findall(r'-c "(.*?)" >', step)[0]
    printed = run(sys.executable, "-c", program, cwd=REPOSITORY).splitlines()
    assert any(line.startswith("torch") for line in printed)
    assert any(line.startswith("opentelemetry-sdk") for line in printed)


# ---------------------------------------------------------------- systemd


def unit() -> dict[str, Any]:
    text = (DEPLOY / "systemd/moeserve.service").read_text()
    pairs = [line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w+=", line)]
    return {name: value for name, value in pairs}  # noqa: C416  (of lists, not pairs)


def test_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/moeserve.service").read_text()
    file = tmp_path / "moeserve.service"
    file.write_text(text.replace("/opt/moeserve/bin/moeserve", sys.executable))
    assert run(tool("systemd-analyze"), "verify", str(file)) == ""


def test_unit_is_hardened(tmp_path: Path) -> None:
    file = shutil.copy(DEPLOY / "systemd/moeserve.service", tmp_path)
    said = run(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(file))
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert float(exposure) <= 2.0


def test_unit_gives_a_drain_its_time_and_names_real_variables() -> None:
    assert float(unit()["TimeoutStopSec"]) > ServerConfig().shutdown_timeout + 20
    example = (DEPLOY / "systemd/moeserve.env").read_text()
    assert set(re.findall(r"MOESERVE_\w+", example + unit()["Environment"])) <= VARIABLES
