"""How long a sandboxed process is waited for: by what it does, not by the clock alone."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from moeserve.processes.sandbox.patience import LOOK_S, Patience, Starved, Stopped, UsedUp


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def began(children: list[subprocess.Popen[bytes]], *command: str) -> subprocess.Popen[bytes]:
    children.append(subprocess.Popen(command))
    return children[-1]


def wait_for(child: subprocess.Popen[bytes], cpu_seconds: float, wall_seconds: float) -> None:
    """For an answer that does not come."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Patience(child.pid, ours, cpu_seconds, wall_seconds).wait(select.POLLIN)


def test_who_computes_too_long_has_used_up_its_time(children: list[subprocess.Popen[bytes]]) -> None:
    busy = began(children, "sh", "-c", "while :; do :; done")
    with pytest.raises(UsedUp):
        wait_for(busy, 0.2, 60)


def test_who_gets_no_time_is_starved_and_not_to_blame(children: list[subprocess.Popen[bytes]]) -> None:
    """As on a busy machine."""
    idle = began(children, "sleep", "60")
    start = time.monotonic()
    with pytest.raises(Starved):
        wait_for(idle, 0.2, 1)
    assert time.monotonic() - start >= 1


@pytest.mark.waits_for_processes("the end is due after ten looks by the clock")
def test_who_is_stopped_is_noticed_soon(children: list[subprocess.Popen[bytes]]) -> None:
    idle = began(children, "sleep", "60")
    idle.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(Stopped):
        wait_for(idle, 20, 60)
    assert time.monotonic() - start < 10 * LOOK_S


def test_who_is_stopped_for_a_moment_is_not_given_up(children: list[subprocess.Popen[bytes]]) -> None:
    idle = began(children, "sleep", "60")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        idle.send_signal(signal.SIGSTOP)
        go_on = threading.Timer(1.5 * LOOK_S, os.kill, (idle.pid, signal.SIGCONT))
        go_on.start()
        answer = threading.Timer(5 * LOOK_S, theirs.send, (b"answer",))
        answer.start()
        Patience(idle.pid, ours, 20, 60).wait(select.POLLIN)
        assert ours.recv(6) == b"answer"


def test_a_process_that_has_ended_is_not_looked_at(children: list[subprocess.Popen[bytes]]) -> None:
    """Its line says so first, but it may have been waited for already."""
    child = began(children, "true")
    child.wait()
    with pytest.raises(Starved):
        wait_for(child, 1, 0.1)
