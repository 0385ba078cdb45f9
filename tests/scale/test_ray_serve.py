"""deploy/replicas/ray_serve.py on one machine: it scales, finds prefixes, and survives the loss and the restart
of servers."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.scale.gateways import GATEWAYS
from tests.scale.prefix_hits import POOL, cached_share
from tests.scale.streams import lost, stream, streaming
from tests.support.servers.server import running_server
from tests.support.servers.waiting import free_port, within

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "replicas"
START_S = 420  # on a busy machine; Ray gives its own proxy three tries
FLAGS = f"--max-total-tokens {POOL} --threads 1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        GATEWAYS is None or not Path(f"{GATEWAYS}/bin/serve").exists(), reason="run make test-replicas"
    ),
]


@dataclass
class Cluster:
    """Ray on this machine, with the application as ray_serve.yaml has it but for `arguments`."""

    url: str
    log: Path
    config: dict[str, Any]
    environment: dict[str, str]

    def roll(self, **arguments: Any) -> None:
        """Has Ray replace every server, one after the other, by one with these arguments."""
        self.config["applications"][0]["args"] |= arguments
        file = self.log.with_name("next.yaml")
        file.write_text(yaml.safe_dump(self.config))
        dashboard = re.search(r"dashboard at (?:\x1b\[\S+?m)*(?:http://)?([\d.]+:\d+)", self.log.read_text())
        assert dashboard is not None, self.log.read_text()
        command = [f"{GATEWAYS}/bin/serve", "deploy", str(file), "--address", f"http://{dashboard[1]}"]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def ray_serve(folder: Path, **arguments: Any) -> Iterator[Cluster]:
    config = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    command = f"{sys.executable} -m moeserve"
    config["applications"][0]["args"] |= {"command": command, "num_cpus": 0.1, "name": "m", **arguments}
    file, log = folder / "ray.yaml", folder / "ray.log"
    file.write_text(yaml.safe_dump(config))
    repository = str(DEPLOY.parents[1])
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # of the dashboard, which takes the next configuration
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": f"{repository}:{DEPLOY}",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [f"{GATEWAYS}/bin/serve", "run", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    cluster = Cluster(f"http://127.0.0.1:{port}", log, config, environment)
    started = psutil.Process(process.pid)
    try:
        wanted = int(arguments["min_replicas"])
        if not within(
            START_S, lambda: answers(cluster.url) and log.read_text().count("launcher: ready") >= wanted
        ):
            raise RuntimeError(log.read_text()[-5000:])
        yield cluster
    finally:
        children = started.children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(120)
        psutil.wait_procs(children, timeout=60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/v1/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def replicas() -> dict[int, psutil.Process]:
    """The processes of Ray that own a server, by process id."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "ServeReplica:moeserve:Server" in " ".join(process.info["cmdline"] or ()):
            found[process.pid] = process
    return found


def load(replica: psutil.Process) -> float:
    """How many requests its server has, running and waiting."""
    open_sockets = [
        connection.laddr
        for process in replica.children(recursive=True)
        for connection in process.net_connections("unix")
    ]
    path = next(path for path in open_sockets if path.endswith("/http.sock"))
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=30) as client:
        metrics = client.get("http://server/metrics").text
    return sum(
        float(value)
        for value in re.findall(r"(?m)^moeserve:num_requests_(?:running|waiting)\b.* (\S+)$", metrics)
    )


def test_prefixes_are_found_and_a_lost_server_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tiny_model, "--max-total-tokens", str(3 * POOL), "--served-model-name", "m") as one:
        alone = cached_share(one.base_url, "one")
        expected = [stream(one.base_url, number, 150) for number in range(48)]
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 3, "max_replicas": 3}
    with ray_serve(tmp_path, **arguments) as cluster:
        url = cluster.url
        share = cached_share(url, "ray")
        print(f"one server {alone:.2f}, Ray Serve {share:.2f}")
        assert share >= 0.9 * alone
        with ThreadPoolExecutor(48) as pool:
            asked = [pool.submit(stream, url, number, 150) for number in range(48)]
            assert within(60, lambda: sum(map(load, replicas().values())) == 48)
            victim = max(replicas().values(), key=load)
            there = load(victim)
            victim.kill()
            later = [pool.submit(stream, url, 100 + number, 4) for number in range(24)]
            streams = [one.result(180) for one in asked]
            after = [one.result(180).end for one in later]
        ended = lost(streams, expected)
        print(f"{ended} of 48 end with an error, {int(there)} were there; after: {set(after)}")
        assert 0 < ended <= there
        assert set(after) == {"length"}
        assert within(120, lambda: len(replicas()) == 3 and victim.pid not in replicas())
        assert stream(url, 999, 4).end == "length"


def test_a_rolling_restart_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 3, "max_replicas": 3}
    with ray_serve(tmp_path, **arguments) as cluster:
        before = set(replicas())
        assert len(before) == 3
        start = time.monotonic()
        with streaming(cluster.url, clients=8, tokens=40) as ends:
            cluster.roll(flags=f"{FLAGS} --seed 1")
            assert within(300, lambda: len(replicas()) == 3 and not before & set(replicas()))
        seconds = time.monotonic() - start
    print(f"Ray Serve: {len(ends)} streams in {seconds:.0f} s of restarts, { ({one.end for one in ends}) }")
    assert {one.end for one in ends} == {"length"}
    assert len(ends) > 30


def test_it_scales_with_the_load(tiny_model: Path, tmp_path: Path) -> None:
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 1, "max_replicas": 2}
    with (
        ray_serve(
            tmp_path, **arguments, target_ongoing_requests=2, upscale_delay_s=1, downscale_delay_s=5
        ) as cluster,
        ThreadPoolExecutor(8) as pool,
    ):
        ends = [pool.submit(stream, cluster.url, number, 1500) for number in range(8)]
        assert within(120, lambda: len(replicas()) == 2)
        assert [end.result(300).end for end in ends] == ["length"] * 8
        assert within(120, lambda: len(replicas()) == 1)


def test_the_answers_are_the_servers_own(tiny_model: Path, tmp_path: Path) -> None:
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 1, "max_replicas": 1}
    with ray_serve(tmp_path, **arguments) as cluster:
        url = cluster.url
        refused = httpx.post(url + "/v1/completions", json={"prompt": "a", "temperature": 9})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert httpx.post(url + "/v1/messages", json={}).json()["type"] == "error"
        assert "moeserve:build_info" in httpx.get(url + "/metrics").text
        assert re.search(r"<title>Chat", httpx.get(url + "/").text)
        assert httpx.head(url + "/health").status_code == 200
