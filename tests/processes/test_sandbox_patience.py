"""How long a sandboxed process is waited for: by what it does, not by the clock alone."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeserve.processes.process_state import ProcessState, state_of
from moeserve.processes.sandbox import parent, patience
from moeserve.processes.sandbox.patience import Patience, Starved, Stopped, UsedUp
from tests.support.servers.waiting import within


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
    with pytest.raises(Starved):
        wait_for(idle, 0.2, 1)


def test_a_start_may_wait_for_the_processor_longer_than_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with a load of 20, and under an emulator."""
    waits = tmp_path / "waits_first.py"
    waits.write_text(
        "import socket, time\n"
        "from moeserve.processes.sandbox.frames import send_frame\n"
        "time.sleep(6)\n"
        "send_frame(socket.socket(fileno=0), b'ready')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(parent, "START_SECONDS", 3.0)
    sandbox = parent.Sandbox("waits_first", "a test", timeout=1, max_reply_bytes=100)
    try:
        sandbox.run_sync(sandbox.start)
        assert sandbox.is_running
    finally:
        sandbox.close()


def test_a_start_that_uses_no_processor_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its modules are on a network disk that hangs."""
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(parent, "START_IDLE_SECONDS", 1.0)
    sandbox = parent.Sandbox("hangs", "a test", timeout=1, max_reply_bytes=100)
    try:
        with pytest.raises(parent.SandboxUnavailable, match="got no processor time"):
            sandbox.run_sync(sandbox.start)
        assert not sandbox.is_running
    finally:
        sandbox.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[], object]]:
    """What happens after a look, by its number; each is added when it has been."""
    then: dict[int, Callable[[], object]] = {}
    numbers = itertools.count()

    def state_then(pid: int) -> ProcessState:
        state = state_of(pid)
        then.setdefault(next(numbers), lambda: None)()
        return state

    monkeypatch.setattr(patience, "state_of", state_then)
    return then


def stopped(child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    child.send_signal(signal.SIGSTOP)
    assert within(30, lambda: state_of(child.pid).is_stopped)
    return child


def test_who_is_stopped_is_noticed_at_the_second_look(
    children: list[subprocess.Popen[bytes]], looks: dict[int, Callable[[], object]]
) -> None:
    with pytest.raises(Stopped):
        wait_for(stopped(began(children, "sleep", "60")), 20, 60)
    assert len(looks) == 1 + 2, "the first is at the question"


def test_who_is_stopped_for_a_moment_is_not_given_up(
    children: list[subprocess.Popen[bytes]], looks: dict[int, Callable[[], object]]
) -> None:
    idle = stopped(began(children, "sleep", "60"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        looks[1] = lambda: idle.send_signal(signal.SIGCONT)
        looks[4] = lambda: theirs.send(b"answer")
        Patience(idle.pid, ours, 20, 60).wait(select.POLLIN)
        assert ours.recv(6) == b"answer"


def test_a_process_that_has_ended_is_not_looked_at(children: list[subprocess.Popen[bytes]]) -> None:
    """Its line says so first, but it may have been waited for already."""
    child = began(children, "true")
    child.wait()
    with pytest.raises(Starved):
        wait_for(child, 1, 0.1)
