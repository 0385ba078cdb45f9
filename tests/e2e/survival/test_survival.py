"""Processes that are killed or stopped: others go on with the answers, and their readers notice a pause."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST
from moeserve.launcher.process_table import PROCESSES
from tests.conftest import TEST_DEVICE
from tests.e2e.completions import TEXT, completion, health_url, is_empty, streamed
from tests.e2e.survival.killed_answers import (
    all_at_once,
    bodies,
    generated,
    has_generated,
    health,
    many_bodies,
)
from tests.support.servers.server import Server, running_server, title_of
from tests.support.servers.suspending import suspend
from tests.support.servers.waiting import within

KILLS = 50


def repeated(server: Server) -> dict[str, Any]:
    """An answer whose prompt has been computed before. On a GPU, one that is computed whole may round differently."""
    completion(server, prompt=TEXT)
    return completion(server, prompt=TEXT)


def repeats(server: Server, answer: dict[str, Any]) -> bool:
    """It gives this answer, and again from the cache: on a GPU, only that one is promised."""
    whole, cached = (completion(server, prompt=TEXT) for _ in "ab")
    return cached == answer and (TEST_DEVICE == "cuda" or whole == answer)


def back(server: Server, before: psutil.Process) -> bool:
    """Another worker serves."""
    return not before.is_running() and health(server) == 200


def is_whole(server: Server) -> bool:
    """It serves, and none of its processes is missing, or still without a name."""
    titles = []
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            titles.append(title_of(process))
    return health(server) == 200 and all(f"moeserve: {name}" in titles for name in PROCESSES)


@pytest.fixture
def own_server(tiny_model: Path) -> Iterator[Server]:
    running = Server(tiny_model, "--step-timeout", "5", "--max-engine-crashes", "10", "--health-port", "0")
    yield running
    running.kill()


@pytest.mark.cpu_engine("answers are bit-equal whatever shares their steps")
def test_answers_go_on_when_processes_are_killed(own_server: Server) -> None:
    """The worker outlives the others, and what it has loaded."""
    requests = bodies(100)
    with all_at_once(own_server, requests) as futures:
        expected = [future.result()[0] for future in futures]
    for name in ("router", "detokenizer", "worker"):
        process, worker = own_server.named(name), own_server.named("worker")
        detokenizer = own_server.named("detokenizer")
        before = generated(own_server)
        is_killed = False
        while not is_killed:
            begun_at = generated(own_server)
            with all_at_once(own_server, requests) as futures:
                assert within(60, partial(has_generated, own_server, begun_at + 100))
                # On a busy machine the first have ended when this is noticed.
                if not any(future.done() for future in futures):
                    is_killed = True
                    process.kill()
                assert [future.result()[0] for future in futures] == expected, name
        assert not process.is_running()
        assert generated(own_server) > before + 100
        assert (own_server.named("worker") == worker) == (name != "worker")
        assert (own_server.named("detokenizer") == detokenizer) == (name != "detokenizer")
    assert within(30, lambda: is_empty(own_server))
    assert within(30, lambda: own_server.metrics()["moeserve:engine_losses_total"] == 3)
    assert own_server.metrics()["moeserve:requests_continued_total"] > 3
    assert own_server.stop() == 0, own_server.log
    assert own_server.survivors() == []


def test_a_lost_httpserver_is_replaced_and_nothing_of_its_requests_is_left(own_server: Server) -> None:
    """Who connects before the next one is there waits for it, and is refused at no moment."""
    before = repeated(own_server)
    lost = own_server.named("httpserver")
    kept = [own_server.named(name) for name in ("router", "detokenizer", "worker")]
    streams = [streamed(own_server, prompt=f"{i} {TEXT}", max_tokens=1900) for i in range(16)]
    for events in streams:
        next(events)
    lost.kill()
    for _ in range(20):  # through all of its start
        for url in (own_server.base_url, health_url(own_server)):
            assert httpx.get(url + "/health", timeout=30).status_code in (200, 503)
        time.sleep(0.05)
    for events in streams:
        with pytest.raises(httpx.TransportError):
            list(events)
    assert within(30, lambda: health(own_server) == 200), own_server.log
    assert within(30, lambda: is_empty(own_server))
    assert repeats(own_server, before)
    assert within(30, lambda: own_server.metrics()["moeserve:num_aborts_total"] >= 16)
    assert [own_server.named(name) for name in ("router", "detokenizer", "worker")] == kept
    assert own_server.named("httpserver") != lost
    assert own_server.stop() == 0, own_server.log
    assert own_server.survivors() == []


@pytest.mark.slow
@pytest.mark.cpu_engine("answers are bit-equal whatever shares their steps")
def test_answers_go_on_when_the_worker_is_stopped(own_server: Server) -> None:
    requests = bodies()
    with all_at_once(own_server, requests) as futures:
        expected = [future.result()[0] for future in futures]
    worker = own_server.named("worker")
    before = generated(own_server)
    with all_at_once(own_server, requests) as futures:
        assert within(60, partial(has_generated, own_server, before + 800))
        suspend(worker)
        assert within(60, partial(back, own_server, worker)), own_server.log
        assert [future.result()[0] for future in futures] == expected
    assert own_server.stop() == 0, own_server.log


@pytest.mark.cpu_engine("no fork has a GPU")
def test_a_model_is_not_loaded_again(own_server: Server) -> None:
    """What serves is a fork of the process that has loaded it."""
    weights, worker = own_server.named("weights"), own_server.named("worker")
    assert worker.parent() == weights
    before = memory_of(own_server)
    events = streamed(own_server, prompt=TEXT, max_tokens=400)
    next(events)
    worker.kill()
    assert [*events][-1]["choices"][0]["finish_reason"] == "length"
    assert own_server.named("weights") == weights
    assert len(weights.children()) == 1
    assert memory_of(own_server) < 1.05 * before + (16 << 20)


@pytest.mark.slow
def test_router_and_detokenizer_share_what_took_long(own_server: Server) -> None:
    zygote = own_server.named("zygote")
    assert zygote.num_threads() == 1, "no fork has another"
    for name in ("router", "detokenizer"):
        process = own_server.named(name)
        process.kill()
        process.wait(30)
        assert within(30, partial(is_whole, own_server)), own_server.log
        memory = own_server.named(name).memory_full_info()
        assert memory.uss < memory.rss / 2
    assert own_server.named("zygote") == zygote
    assert zygote.memory_full_info().uss < 16 << 20, "its own; twice this for the code alone"
    assert own_server.stop() == 0, own_server.log


def memory_of(server: Server) -> int:
    """Bytes of all processes that are no file's, pages that they share once."""
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in server.processes()]
    return sum(1024 * int(rollup.partition("Pss_Anon:")[2].split()[0]) for rollup in rollups)


@pytest.mark.slow
@pytest.mark.cpu_engine("no fork has a GPU")
def test_requests_wait_for_the_next_worker_and_a_drain_does_too(own_server: Server) -> None:
    """Also where the process with the weights is lost, so that the model is loaded again."""
    own_server.named("weights").kill()
    assert within(30, lambda: health(own_server) == 503)
    assert httpx.get(own_server.base_url + "/health").json()["status"] == "restarting"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: [*streamed(own_server, prompt=TEXT, max_tokens=4)])
        assert within(30, lambda: own_server.metrics()["moeserve:num_requests_waiting"] == 1)
        own_server.process.send_signal(signal.SIGTERM)
        events = answer.result(60)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert own_server.process.wait(30) == 0, own_server.log
    assert own_server.survivors() == []


def test_continuation_can_be_turned_off_and_crashes_end_the_server(tiny_model: Path) -> None:
    server = Server(tiny_model, "--on-engine-loss", "fail", "--max-engine-crashes", "2")
    try:
        events = streamed(server, prompt=TEXT, max_tokens=1900)
        next(events)
        worker = server.named("worker")
        worker.kill()
        *_, last = events
        assert "error" in last
        assert within(60, lambda: back(server, worker))
        server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1})
        server.named("worker").kill()
        assert server.process.wait(30) == EXIT_ENGINE_LOST
        assert server.survivors() == []
        assert not server.runtime_dir.exists()
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["router", "detokenizer"])
def test_a_stopped_process_is_noticed_and_replaced(own_server: Server, name: str) -> None:
    """Also where no answer is under way: /health was 200 while the detokenizer stood still."""
    process, httpserver = own_server.named(name), own_server.named("httpserver")
    before = repeated(own_server)
    suspend(process)
    assert within(30, lambda: health(own_server) == 503)
    said = httpx.get(own_server.base_url + "/health").json()
    assert said["status"] in ("unresponsive", "restarting"), said
    assert name in said["cause"], said
    assert within(30, lambda: not process.is_running()), own_server.log
    assert within(30, lambda: health(own_server) == 200)
    assert repeats(own_server, before)
    assert "because it was stopped" in own_server.log
    assert own_server.named("httpserver") == httpserver, "it has answered every heartbeat request"


@pytest.mark.slow
def test_a_worker_that_is_stopped_while_nothing_runs_is_noticed(own_server: Server) -> None:
    worker = own_server.named("worker")
    before = repeated(own_server)
    suspend(worker)
    assert within(60, lambda: back(own_server, worker)), own_server.log
    assert repeats(own_server, before)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.cpu_engine("answers are bit-equal whatever shares their steps")
@pytest.mark.parametrize("name", ["worker", "router", "detokenizer"])
def test_fifty_kills(tiny_model: Path, name: str) -> None:
    """At random moments: while prompts are read, in decode, for a mask, while nothing runs. Every answer is that of the
    undisturbed run, and no client sees an error."""
    rng = random.Random(name)
    requests = many_bodies(300)
    with running_server(tiny_model, "--max-engine-crashes", "1000") as server:
        with all_at_once(server, requests) as futures:
            expected = [future.result()[0] for future in futures]
        stop = threading.Event()

        def kill_now_and_then() -> None:
            for _ in range(KILLS):
                time.sleep(rng.uniform(0.0, 2.0))
                server.named(name).kill()
                assert within(60, partial(is_whole, server)), server.log
            stop.set()

        rounds = 0
        with ThreadPoolExecutor(1) as pool:
            killer = pool.submit(kill_now_and_then)
            while not stop.is_set() and not killer.done():
                with all_at_once(server, requests) as futures:
                    assert [future.result()[0] for future in futures] == expected, server.log
                rounds += 1
                time.sleep(0.3)  # nothing runs
            killer.result()
        assert rounds > 1
        assert within(30, lambda: is_empty(server))
        losses = server.metrics()["moeserve:engine_losses_total"]
    assert losses >= KILLS
