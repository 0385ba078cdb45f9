"""A launcher that is stopped by a signal goes on, although no process of a server is there to see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.support.servers.server import clean_environment, title_of
from tests.support.servers.suspending import suspend
from tests.support.servers.waiting import until

PATIENCE_S = 30.0
LAUNCHER = """
import time
from moeserve.launcher.watchdog import Watchdog
watchdog = Watchdog(0.3)
print("begun", flush=True)
while True:
    time.sleep(0.1)
    watchdog.look()
"""


@pytest.fixture
def launcher() -> Iterator[psutil.Process]:
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield psutil.Process(process.pid)
        process.kill()


def watchdogs(launcher: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in launcher.children():
        with suppress(psutil.NoSuchProcess):  # a zombie, until the launcher looks
            if title_of(child) == "moeserve: watchdog":
                found.append(child)
    return found


def test_a_stopped_launcher_is_resumed_and_a_lost_watchdog_replaced(launcher: psutil.Process) -> None:
    suspend(launcher)
    until(lambda: launcher.status() != psutil.STATUS_STOPPED, PATIENCE_S)
    (first,) = watchdogs(launcher)
    suspend(first)
    until(lambda: first.status() != psutil.STATUS_STOPPED, PATIENCE_S)
    first.kill()
    until(lambda: [one for one in watchdogs(launcher) if one.pid != first.pid] != [], PATIENCE_S)
    (second,) = watchdogs(launcher)
    suspend(launcher)
    until(lambda: launcher.status() != psutil.STATUS_STOPPED, PATIENCE_S)
    launcher.kill()
    until(lambda: not second.is_running(), PATIENCE_S)
