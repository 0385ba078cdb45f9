"""Upgrades by the launcher: the next server takes over, and the process id stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import psutil

from moeserve.launcher.process_table import PROCESSES
from tests.support.servers.launcher_run import REPOSITORY, Run


def reload(run: Run) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moeserve", "reload", "--pid", str(run.popen.pid)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(run.runtime_base), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_next_server_takes_over_and_the_one_after_it_too(start: Callable[..., Run]) -> None:
    """The first launcher stays the parent, and its process id that of the server."""
    run = start().until_ready()
    first = run.family[1:]
    assert reload(run).returncode == 0, run.log
    assert "process.listens_when_ready=True" in run.log
    psutil.wait_procs(first, timeout=30)
    assert not any(process.is_running() for process in first), run.log
    (second,) = psutil.Process(run.popen.pid).children()
    assert second.cmdline()[0] == "moeserve: launcher"
    run.popen.send_signal(signal.SIGUSR2)
    run.wait_for(lambda: run.log.count("the next server is ready") == 2)
    second.wait(30)
    (third,) = psutil.Process(run.popen.pid).children()
    run.popen.send_signal(signal.SIGHUP)
    run.wait_for_log("httpserver has a SIGHUP")
    run.family = [run.family[0], third, *third.children(recursive=True)]
    with socket.create_connection(run.address, timeout=30):
        pass
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log
    assert "ERROR" not in run.log


def test_the_parent_ends_as_the_server_does_that_serves(start: Callable[..., Run]) -> None:
    run = start("httpserver:hang", timeout=60).until_ready()
    assert reload(run).returncode == 0, run.log
    psutil.wait_procs(run.family[1:], timeout=30)
    (second,) = psutil.Process(run.popen.pid).children()
    run.family = [run.family[0], second, *second.children(recursive=True)]
    second.terminate()
    run.wait_for_log("stopping: ")
    second.terminate()
    assert run.end() == 1, run.log


def test_an_upgrade_that_fails_leaves_the_server_as_it_was(start: Callable[..., Run]) -> None:
    run = start("httpserver:bug as the next").until_ready()
    result = reload(run)
    assert result.returncode == 1
    assert "the next server ended with exit code 1" in result.stderr
    assert "the upgrade failed" in run.log
    assert all(run.child(name).is_running() for name in PROCESSES)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log
    nobody = reload(run)
    assert (nobody.returncode, nobody.stderr) == (1, "moeserve reload: there is no such server\n")
