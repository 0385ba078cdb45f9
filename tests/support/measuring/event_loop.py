"""How long the event loop of an httpserver is busy with one thing, in CPU seconds: a busy machine is no part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.servers.http_harness import HttpServer


def loop_seconds(server: HttpServer) -> float:
    """Returns the CPU seconds of the event loop's thread."""
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def longest_while(server: HttpServer, ask: Callable[[], object]) -> float:
    """The event loop's time within one /health, at most, while `ask` runs."""
    asking = threading.Thread(target=ask)
    longest = 0.0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.get("/health")
        asking.start()
        while asking.is_alive():
            before = loop_seconds(server)
            assert client.get("/health").status_code == 200
            longest = max(longest, loop_seconds(server) - before)
            time.sleep(0.002)
    return longest
