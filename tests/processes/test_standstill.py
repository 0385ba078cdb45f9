"""Processes that do nothing although others wait for them: each has a deadline, the log says so, and at the end there
is another one or an exit code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from moeserve.launcher.crash_count import CrashCount
from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST, EXIT_FAILED
from moeserve.launcher.heartbeats import MOST_MISSED
from moeserve.launcher.standstill import STILL_S, Standstill
from moeserve.processes.silence import LEAST_LIMIT_S, LauncherWatch, longest_silence
from tests.support.nightly import nightly_after
from tests.support.servers.launcher_run import Run
from tests.support.servers.suspending import suspend
from tests.support.servers.waiting import within

LIMIT_S = LEAST_LIMIT_S


def begin(start: Callable[..., Run], misbehaviour: str = "", **how: float) -> Run:
    return start(misbehaviour, step_timeout=LIMIT_S, **how)


def stop(run: Run, code: int = 0) -> None:
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == code, run.log


def test_a_stopped_keeper_is_continued_when_its_worker_dies(start: Callable[..., Run]) -> None:
    """It said nothing of the worker's death: for ever nothing happened, and the log had no line."""
    run = begin(start, "worker:forked").until_ready()
    keeper, worker = run.child("weights"), run.child("worker")
    suspend(keeper)
    worker.kill()
    run.wait_for_log("the weights process is needed, but was stopped; it is continued")
    run.wait_for_log("the engine is back: the worker was ready")
    run.until_ready()
    assert run.child("weights") == keeper
    assert run.child("worker") != worker
    stop(run)


def test_a_keeper_that_hangs_is_given_up_with_all_that_it_keeps(start: Callable[..., Run]) -> None:
    run = begin(start, "worker:forked, keeper hangs").until_ready()
    keeper = run.child("weights")
    run.child("worker").kill()
    run.wait_for_log("weights died (the weights process has done nothing for 3 s; killed)")
    run.wait_for_log("worker died (the weights process has done nothing for 3 s; killed)")
    run.wait_for_log("the engine is back: the worker was ready")
    run.until_ready()
    assert run.child("weights") != keeper
    stop(run)


@pytest.mark.slow
def test_workers_that_never_start_again_end_the_server(start: Callable[..., Run]) -> None:
    """However far apart their ends are: as with a limit of a minute, of which the window of crashes has one."""
    run = begin(start, "worker:forked, the next are stopped", crash_window=1.0).until_ready()
    run.child("worker").kill()
    assert run.end(60) == EXIT_ENGINE_LOST
    cause = "the worker process does not answer, because it was stopped; killed"
    assert run.log.count(f"worker died ({cause})") == 3, run.log
    assert "the worker could not start 3 times in a row: the server ends" in run.log


@pytest.mark.parametrize("name", nightly_after(1, ["worker", "httpserver", "router"]))
def test_a_process_that_stands_still_while_it_starts_ends_the_start(
    start: Callable[..., Run], name: str
) -> None:
    run = begin(start, f"{name}:stopped while starting")
    assert run.end() == EXIT_FAILED
    cause = f"the {name} process does not answer, because it was stopped; killed"
    assert f"{name} died while starting: {cause}" in run.log


def test_a_zygote_that_stands_still_while_it_starts_is_done_without(start: Callable[..., Run]) -> None:
    run = begin(start, "zygote:stopped while starting").until_ready()
    assert (
        "the zygote has died (the zygote process does not answer, because it was stopped; killed)" in run.log
    )
    assert "router was started" in run.log
    stop(run)


@pytest.mark.parametrize("name", nightly_after(1, ["worker", "zygote"]))
def test_a_stopped_process_is_noticed_although_nothing_is_asked_of_it(
    start: Callable[..., Run], name: str
) -> None:
    run = begin(start, "worker:forked").until_ready()
    process = run.child(name)
    suspend(process)
    run.wait_for_log(f"died (the {name} process does not answer, because it was stopped; killed)")
    run.wait_for(lambda: not process.is_running())
    if name == "worker":
        run.wait_for_log("the engine is back: the worker was ready")
        assert "by_itself=False" in run.log
    stop(run)


@pytest.mark.slow
def test_a_stopped_keeper_whose_worker_serves_is_left_alone(start: Callable[..., Run]) -> None:
    run = begin(start, "worker:forked").until_ready()
    keeper, worker = run.child("weights"), run.child("worker")
    suspend(keeper)
    time.sleep(2 * LIMIT_S)
    assert keeper.status() == psutil.STATUS_STOPPED
    assert worker.is_running()
    stop(run)


@pytest.mark.slow
def test_a_worker_that_computes_for_a_lost_router_for_ever_is_replaced(start: Callable[..., Run]) -> None:
    """The next router would wait for it for ever."""
    run = begin(start, "worker:computes for ever").until_ready()
    worker = run.child("worker")
    run.child("router").kill()
    run.wait_for_log("worker died (the worker does not answer; killed)")
    assert not worker.is_running()
    stop(run, EXIT_FAILED)  # the next one computes for ever, too


@pytest.mark.parametrize(
    "name", nightly_after(2, ["worker", "httpserver", "router", "detokenizer", "weights"])
)
def test_what_is_stopped_is_continued_for_an_orderly_end(start: Callable[..., Run], name: str) -> None:
    run = start("worker:forked").until_ready()
    suspend(run.child(name))
    stop(run)
    assert f"the {name} process is needed, but was stopped; it is continued" in run.log


@pytest.mark.slow
def test_what_is_stopped_while_requests_finish_is_continued(start: Callable[..., Run]) -> None:
    """It was killed for it, and the exit code was a failure's."""
    run = start("httpserver:hang", timeout=0.5).until_ready()
    run.popen.send_signal(signal.SIGTERM)
    run.wait_for_log("stopping: ")
    suspend(run.child("router"))
    assert run.end() == EXIT_FAILED, run.log  # httpserver hangs
    assert "the router process is needed, but was stopped; it is continued" in run.log
    assert "router did not stop in time" not in run.log


# ---------------------------------------------------------------- the pieces


def test_a_death_in_a_minute_counts_and_so_does_a_start_that_fails() -> None:
    crashes = CrashCount(3)
    assert [crashes.add("worker", was_ready=True) for _ in "abc"] == [
        None,
        None,
        "processes crashed 3 times in a minute",
    ]
    slow = CrashCount(3)
    words = []
    for was_ready in (True, False, False, False):
        words.append(slow.add("worker", was_ready=was_ready))
        slow._times.clear()
    assert words == [None, None, None, "the worker could not start 3 times in a row"]
    assert slow.add("router", was_ready=False) is None


def test_the_longest_silence_follows_the_step_timeout() -> None:
    assert [longest_silence(given) for given in (None, 1.0, 300.0)] == [60.0, 4.0, 300.0]
    interval_s = longest_silence(None) / MOST_MISSED
    assert STILL_S / interval_s > MOST_MISSED, "a slow disk is given longer than a process that was stopped"
    assert Standstill(interval_s, MOST_MISSED).look([], []) == []


@pytest.fixture
def sleeper() -> Iterator[psutil.Popen]:
    process = psutil.Popen(["sleep", "60"])
    yield process
    with suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait()


def is_silent(watch: LauncherWatch) -> bool:
    return watch.is_silent


def silent_for(watch: LauncherWatch, seconds: float, *, is_needed: bool) -> None:
    """As if so much time had passed, in looks of one second."""
    for _ in range(round(seconds)):
        watch._looked_at -= 1.0
        watch.look(is_needed=is_needed)


def test_a_stopped_launcher_is_continued_and_one_that_hangs_is_killed_where_it_is_needed(
    sleeper: psutil.Popen,
) -> None:
    watch = LauncherWatch(sleeper.pid, 10.0)
    sleeper.suspend()
    assert within(30, lambda: sleeper.status() == psutil.STATUS_STOPPED)
    silent_for(watch, 9, is_needed=True)
    assert sleeper.status() == psutil.STATUS_STOPPED
    assert not is_silent(watch)
    silent_for(watch, 2, is_needed=False)
    assert is_silent(watch)
    assert within(30, lambda: sleeper.status() != psutil.STATUS_STOPPED)
    watch.asked()
    assert not is_silent(watch)
    silent_for(watch, 100, is_needed=False)
    assert sleeper.is_running()
    silent_for(watch, 1, is_needed=True)
    assert sleeper.wait(30) == -signal.SIGKILL


def test_a_child_that_was_stopped_itself_blames_nobody(sleeper: psutil.Popen) -> None:
    watch = LauncherWatch(sleeper.pid, 10.0)
    watch._looked_at -= 3600.0
    watch.look(is_needed=True)
    assert not is_silent(watch)


def test_where_there_is_no_launcher_nothing_is_watched() -> None:
    watch = LauncherWatch(None, 1.0)
    silent_for(watch, 10, is_needed=True)
    assert not is_silent(watch)
    assert os.getppid() > 0


def test_a_launcher_that_asks_nothing_is_continued_at_the_second_look(sleeper: psutil.Popen) -> None:
    """The front's, to which no silence says that it was stopped."""
    watch = LauncherWatch(sleeper.pid, 10.0)
    watch.resume_stopped()
    suspend(sleeper)
    watch.resume_stopped()
    assert sleeper.status() == psutil.STATUS_STOPPED
    watch.resume_stopped()
    assert within(30, lambda: sleeper.status() != psutil.STATUS_STOPPED)
