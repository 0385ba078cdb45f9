"""Gateways from PyPI in front of real servers.

They need MOESERVE_GATEWAYS, a virtual environment with `smg` and `vllm-router` that `make test-replicas` makes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.servers.waiting import free_port

GATEWAYS = os.environ.get("MOESERVE_GATEWAYS")
READY_S = 60.0
# As deploy/replicas/ has them: a replica that says no to /health/ready gets no requests a second later.
HEALTH = (
    *("--health-check-endpoint", "/health/ready", "--health-check-interval-secs", "1"),
    *(
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
        "--health-check-timeout-secs",
        "5",
    ),
)
MODULES = {"smg": "smg.launch_router", "vllm-router": "vllm_router.launch_router"}


@dataclass
class Gateway:
    url: str
    log: Path


@contextmanager
def gateway(name: str, policy: str, workers: Sequence[str], folder: Path, *more: str) -> Iterator[Gateway]:
    """A gateway that has found all `workers`, which are URLs. Raises RuntimeError when it does not."""
    assert GATEWAYS is not None
    port, log = free_port(), folder / f"{name}-{policy}.log"
    program = [f"{GATEWAYS}/bin/python", "-m", MODULES[name]]
    addresses = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    flags = ["--policy", policy, "--worker-startup-check-interval", "1", *HEALTH, *more]
    with log.open("w") as out:
        command = [*program, *addresses, *flags, "--worker-urls", *workers]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    made = Gateway(f"http://127.0.0.1:{port}", log)
    try:
        wait_for(made, len(workers))
        yield made
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def healthy(gateway: Gateway) -> int:
    """How many replicas the gateway would send requests to."""
    try:
        found = httpx.get(gateway.url + "/workers", timeout=5).json()["workers"]
    except (httpx.TransportError, ValueError):
        return 0
    return sum(worker["is_healthy"] for worker in found)


def wait_for(gateway: Gateway, count: int) -> None:
    deadline = time.monotonic() + READY_S
    while healthy(gateway) != count:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the gateway does not see {count} replicas:\n{gateway.log.read_text()[-3000:]}"
            )
        time.sleep(0.1)
