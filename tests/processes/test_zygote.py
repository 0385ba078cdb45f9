"""Router and detokenizer are forks of the zygote, and need it no more once they live."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.support.servers.launcher_run import Run
from tests.support.servers.suspending import suspend


def kill(run: Run, name: str) -> None:
    """And waits for the next one."""
    backs = run.log.count("the engine is back")
    run.child(name).kill()
    run.wait_for(lambda: run.log.count("the engine is back") > backs)
    run.until_ready()


def until_another_zygote(run: Run, last: psutil.Process) -> None:
    """Which can fork."""
    run.wait_for_log("the zygote is back")
    assert run.until_ready().child("zygote") != last


@pytest.mark.parametrize("name", ["router", "detokenizer"])
def test_a_process_is_forked_and_so_is_the_next(start: Callable[..., Run], name: str) -> None:
    run = start().until_ready()
    assert run.log.count(f"{name} was forked") == 1
    launcher = run.child("launcher")
    zygote = run.child("zygote")
    for times in (2, 3):  # a third crash within a minute would end the server
        kill(run, name)
        assert run.log.count(f"{name} was forked") == times
        assert run.child("zygote") == zygote
        assert zygote.children() == []
        assert run.child(name).ppid() == launcher.pid, "which waits for it, and which it dies with"
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in launcher.children(recursive=True))
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_a_lost_zygote_takes_nobody_with_it_and_is_replaced(start: Callable[..., Run]) -> None:
    """As young as here, where it may never start, when the next process is wanted."""
    run = start().until_ready()
    zygote, others = run.child("zygote"), [run.child(name) for name in ("router", "detokenizer")]
    zygote.kill()
    run.wait_for_log("the zygote has died (signal 9, Killed")
    assert [run.child(name) for name in ("router", "detokenizer")] == others
    kill(run, "router")
    assert run.log.count("router was started") == 1
    until_another_zygote(run, zygote)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log
    assert "crashed" not in run.log


def test_a_stopped_zygote_is_given_up(start: Callable[..., Run]) -> None:
    """The router is started the ordinary way then, and the next one forked again."""
    run = start().until_ready()
    zygote = run.child("zygote")
    suspend(zygote)
    kill(run, "router")
    assert "the zygote did not fork" in run.log
    assert run.log.count("router was started") == 1
    assert not zygote.is_running()
    until_another_zygote(run, zygote)
    kill(run, "detokenizer")
    assert run.log.count("detokenizer was forked") == 2, run.log
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_a_server_without_a_zygote_starts(start: Callable[..., Run]) -> None:
    run = start("zygote:killed while starting").until_ready()
    assert "router was started" in run.log
    assert "detokenizer was started" in run.log
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_forks_die_with_the_launcher(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    kill(run, "router")
    run.popen.kill()
    _, alive = psutil.wait_procs(run.family[1:], timeout=30)
    assert alive == []
