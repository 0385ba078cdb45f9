"""Waiting for conditions, and ports that are free to listen on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def within(seconds: float, condition: Callable[[], bool], interval_s: float = 0.01) -> bool:
    """Waits at most `seconds` for the condition, and returns whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def until(condition: Callable[[], bool], seconds: float, fault: Callable[[], str] | None = None) -> None:
    """Waits for the condition. Raises AssertionError with `fault()` if it is not true after `seconds`."""
    assert within(seconds, condition, 0.02), "" if fault is None else fault()


def free_port() -> int:
    """Returns a TCP port on which no process of this machine listens on 127.0.0.1 now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
