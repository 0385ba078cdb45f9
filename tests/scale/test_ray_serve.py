"""deploy/replicas/ray_serve.py on one machine: it scales, finds prefixes, and survives the loss of a server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.server import running_server
from tests.e2e.clients import within
from tests.scale.gateways import GATEWAYS, free_port
from tests.scale.test_replicas import POOL, cached_share, stream

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


@contextmanager
def ray_serve(folder: Path, **arguments: Any) -> Iterator[str]:
    """The application as ray_serve.yaml has it, but for these arguments; yields its URL."""
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
    url = f"http://127.0.0.1:{port}"
    started = psutil.Process(process.pid)
    try:
        wanted = int(arguments["min_replicas"])
        if not within(START_S, lambda: answers(url) and log.read_text().count("launcher: ready") >= wanted):
            raise RuntimeError(log.read_text()[-5000:])
        yield url
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


def test_prefixes_are_found_and_a_lost_server_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tiny_model, "--max-total-tokens", str(3 * POOL), "--served-model-name", "m") as one:
        alone = cached_share(one.base_url, "one")
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 3, "max_replicas": 3}
    with ray_serve(tmp_path, **arguments) as url:
        share = cached_share(url, "ray")
        print(f"one server {alone:.2f}, Ray Serve {share:.2f}")
        assert share >= 0.9 * alone
        with ThreadPoolExecutor(24) as pool:
            ends = [pool.submit(stream, url, number, 150) for number in range(24)]
            time.sleep(1)
            victim = next(iter(replicas().values()))
            victim.kill()
            later = [pool.submit(stream, url, 100 + number, 4) for number in range(12)]
            broken = [end.result(120) for end in ends]
            after = [end.result(120) for end in later]
        print(f"{broken.count('length')} of 24 go on; after: {set(after)}")
        assert {end.split()[0] for end in broken} <= {"length", "error"}
        assert broken.count("length") >= 12
        assert set(after) == {"length"}
        assert within(120, lambda: len(replicas()) == 3 and victim.pid not in replicas())
        assert stream(url, 999, 4) == "length"


def test_it_scales_with_the_load(tiny_model: Path, tmp_path: Path) -> None:
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 1, "max_replicas": 2}
    with (
        ray_serve(
            tmp_path, **arguments, target_ongoing_requests=2, upscale_delay_s=1, downscale_delay_s=5
        ) as url,
        ThreadPoolExecutor(8) as pool,
    ):
        ends = [pool.submit(stream, url, number, 1500) for number in range(8)]
        assert within(120, lambda: len(replicas()) == 2)
        assert [end.result(300) for end in ends] == ["length"] * 8
        assert within(120, lambda: len(replicas()) == 1)


def test_the_answers_are_the_servers_own(tiny_model: Path, tmp_path: Path) -> None:
    arguments = {"model": str(tiny_model), "flags": FLAGS, "min_replicas": 1, "max_replicas": 1}
    with ray_serve(tmp_path, **arguments) as url:
        refused = httpx.post(url + "/v1/completions", json={"prompt": "a", "temperature": 9})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert httpx.post(url + "/v1/messages", json={}).json()["type"] == "error"
        assert "moeserve:build_info" in httpx.get(url + "/metrics").text
        assert re.search(r"<title>Chat", httpx.get(url + "/").text)
        assert httpx.head(url + "/health").status_code == 200
