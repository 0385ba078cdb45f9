"""The router's loop with real sockets, in this process and as the process it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from moeserve.config import ServerConfig, to_json_dict
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import (
    Abort,
    DetokenizeEnd,
    DetokenizeStart,
    EngineLost,
    EngineReady,
    EngineReadyRequest,
    ExpertUseRequest,
    GenerateBatch,
    HeartbeatRequest,
    HttpserverLost,
    ProcessReady,
    RequestError,
    Shutdown,
    StopHit,
)
from moeserve.messages.steps import ExpertUse
from moeserve.messages.worker import Worker, WorkerAnswer
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.tower_page import TowerPage
from moeserve.router import manager
from moeserve.router.worker_client import RpycWorker
from tests.support.router.in_process_worker import InProcessWorker
from tests.support.servers.idle import comes_to_rest
from tests.support.servers.router_process import Neighbours, Workers, behaving, manager_of, running
from tests.support.servers.rpc_child import (
    ANSWER,
    EXPERT_USE,
    RAISE,
    READY,
    REPOSITORY,
    SLEEP,
    ScriptedRunner,
    child_process,
)
from tests.support.servers.waiting import within


class HeldWorker(InProcessWorker):
    """Answers nothing before `may_go`."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.may_go = threading.Event()

    def poll(self) -> list[WorkerAnswer]:
        return super().poll() if self.may_go.is_set() else []


def test_requests_are_served_and_the_load_is_told(paths: RuntimePaths, neighbours: Neighbours) -> None:
    with running(paths, neighbours, InProcessWorker(ScriptedRunner())):
        for id in range(10):
            neighbours.router.send(behaving(id, 0, max_tokens=5))
        assert isinstance(neighbours.detokenizer.recv(30), DetokenizeStart)
        usage = neighbours.item(9, final=True).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (4, 5)
        report = neighbours.report(num_running=0, num_waiting=0, kv_slots_used=0, generation_tokens=50)
        assert report.kv_slots_total == READY.num_kv_slots
        assert report.prompt_tokens == 40


def test_the_experts_use_is_told_once_to_all_who_ask(paths: RuntimePaths, neighbours: Neighbours) -> None:
    worker = HeldWorker(ScriptedRunner())
    with running(paths, neighbours, worker):
        neighbours.router.send(behaving(0, ANSWER, max_tokens=3))
        for _ in range(5):
            neighbours.router.send(ExpertUseRequest())
        neighbours.router.send(EngineReadyRequest())
        neighbours.next(EngineReady)  # all was heard
        worker.may_go.set()
        assert neighbours.next(ExpertUse) == EXPERT_USE
        neighbours.item(0, final=True)
        neighbours.router.send(ExpertUseRequest())
        assert neighbours.next(ExpertUse) == EXPERT_USE
        neighbours.router.send(EngineReadyRequest())
        while not isinstance(message := neighbours.http.recv(30), EngineReady):
            assert isinstance(message, LoadReport)


def test_the_visual_server_sees_open_requests(paths: RuntimePaths, neighbours: Neighbours) -> None:
    seen = TowerPage(paths.tower_page)
    with running(paths, neighbours, InProcessWorker(ScriptedRunner()), tower=TowerPage(paths.tower_page)):
        neighbours.router.send(behaving(0, SLEEP, max_tokens=100))
        neighbours.item(0, final=False)
        assert seen.open_requests == 1
        neighbours.router.send(Abort(0))
        neighbours.report(timeout=30, num_running=0, aborts=1)
        assert within(30, lambda: seen.open_requests == 0)


def test_an_abort_frees_the_slots_within_a_step(paths: RuntimePaths, neighbours: Neighbours) -> None:
    with running(paths, neighbours, InProcessWorker(ScriptedRunner())):
        neighbours.router.send(behaving(0, SLEEP, max_tokens=100))
        neighbours.item(0, final=False)
        neighbours.router.send(Abort(0))
        neighbours.next(DetokenizeEnd)
        neighbours.report(timeout=30, kv_slots_used=0, aborts=1)


def test_what_a_lost_httpserver_wanted_is_freed_and_the_next_one_told(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    worker = InProcessWorker(ScriptedRunner())
    with running(paths, neighbours, worker):
        neighbours.router.send(behaving(1, SLEEP, max_tokens=100))
        neighbours.item(1, final=False)
        neighbours.router.send(HttpserverLost(first_id=100))
        assert neighbours.next(DetokenizeEnd).id == 1
        neighbours.report(num_running=0, kv_slots_used=0, aborts=1)
        neighbours.router.send(behaving(2, SLEEP, max_tokens=4))  # was still on its way
        neighbours.router.send(EngineReadyRequest())
        assert neighbours.next(EngineReady).ready == READY
        neighbours.router.send(behaving(100, SLEEP, max_tokens=4))
        assert neighbours.next(DetokenizeStart).id == 100
        assert neighbours.item(100, final=True).finish_reason == "length"


def test_a_stop_string_ends_the_request(paths: RuntimePaths, neighbours: Neighbours) -> None:
    with running(paths, neighbours, InProcessWorker(ScriptedRunner())):
        neighbours.router.send(behaving(0, SLEEP, max_tokens=100))
        neighbours.item(0, final=False)
        neighbours.router.send(StopHit(0, 1))
        final = neighbours.item(0, final=True)
        assert final.finish_reason == "stop"
        assert final.usage is not None
        assert final.usage.completion_tokens == 1


def tokens_of(neighbours: Neighbours, id: int) -> list[int]:
    """All tokens of a request's answer, to its end."""
    tokens: list[int] = []
    while True:
        item = neighbours.item(id, final=False)
        tokens += item.token_ids
        if item.finish_reason is not None:
            return tokens


def test_a_request_that_fails_two_workers_ends_and_the_others_go_on(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    others = [InProcessWorker(ScriptedRunner()) for _ in range(2)]
    workers = Workers(*others, router=PushChannel(neighbours.context, paths.router))
    with running(paths, neighbours, InProcessWorker(ScriptedRunner()), workers):
        neighbours.router.send(behaving(1, SLEEP, max_tokens=20))
        neighbours.item(1, final=False)
        neighbours.router.send(behaving(0, RAISE, max_tokens=5))
        for _ in range(2):
            assert "the model is on fire" in neighbours.next(EngineLost, timeout=30).cause
            assert neighbours.next(EngineLost, timeout=30).cause == "exit code 1"
            workers.loaded.release()  # a model takes longer to load than the launcher's message to come
        error = neighbours.next(RequestError, timeout=30)
        assert (error.id, error.status) == (0, 500)
        assert "2 times over this request: exit code 1" in error.message
        assert neighbours.item(1, final=True, timeout=30).finish_reason == "length"
        assert len(workers.replaced) == 2
        report = neighbours.report(engine_losses=2, num_running=0)
        assert report.continued >= 2


def test_a_killed_worker_is_replaced_and_its_requests_go_on(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    workers = Workers(InProcessWorker(ScriptedRunner()))
    with (
        child_process(paths.worker) as child,
        running(paths, neighbours, RpycWorker(paths.worker), workers),
    ):
        neighbours.router.send(behaving(0, SLEEP, max_tokens=12))
        first = neighbours.item(0, final=False).token_ids
        child.send_signal(signal.SIGKILL)
        assert len(first + tokens_of(neighbours, 0)) == 12
        assert "gone" in neighbours.next(EngineLost).cause
        assert neighbours.next(EngineReady).ready == READY


def test_without_continuation_a_lost_worker_fails_what_it_computed(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    workers = Workers()
    with (
        child_process(paths.worker) as child,
        running(paths, neighbours, RpycWorker(paths.worker), workers, continue_requests=False),
    ):
        requests = [behaving(id, SLEEP, max_tokens=20) for id in range(6)]  # four slots: two wait
        neighbours.router.send(GenerateBatch.of(requests))
        neighbours.item(0, final=False)
        child.send_signal(signal.SIGKILL)
        errors = [neighbours.next(RequestError) for _ in range(4)]
        workers.others.append(InProcessWorker(ScriptedRunner()))
        assert {error.status for error in errors} == {500}
        left = {*range(6)} - {error.id for error in errors}
        assert neighbours.item(max(left), final=True).finish_reason == "length"


def test_a_worker_that_does_not_answer_is_given_up(paths: RuntimePaths, neighbours: Neighbours) -> None:
    workers = Workers(InProcessWorker(ScriptedRunner()))
    with (
        child_process(paths.worker) as child,
        running(paths, neighbours, RpycWorker(paths.worker), workers, step_timeout=1.0),
    ):
        neighbours.router.send(behaving(0, SLEEP, max_tokens=8))
        neighbours.item(0, final=False)
        child.send_signal(signal.SIGSTOP)
        assert "does not answer" in neighbours.next(EngineLost).cause
        assert len(workers.replaced) == 1
        assert neighbours.item(0, final=True).finish_reason == "length"


def test_a_worker_that_stands_still_while_nothing_runs_is_given_up(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    workers = Workers(InProcessWorker(ScriptedRunner()))
    options = {"step_timeout": 1.0, "idle_ping": 0.2}
    with (
        child_process(paths.worker) as child,
        running(paths, neighbours, RpycWorker(paths.worker), workers, **options),
    ):
        for _ in range(3):
            neighbours.next(ExpertUse)  # its signs of life
        child.send_signal(signal.SIGSTOP)
        assert "does not answer" in neighbours.next(EngineLost).cause
        assert len(workers.replaced) == 1
        neighbours.router.send(behaving(0, SLEEP, max_tokens=2))
        assert neighbours.item(0, final=True).finish_reason == "length"


def test_the_launcher_is_answered(paths: RuntimePaths, neighbours: Neighbours) -> None:
    answers: list[None] = []
    with running(
        paths, neighbours, InProcessWorker(ScriptedRunner()), heartbeat=lambda: answers.append(None)
    ):
        neighbours.router.send(HeartbeatRequest())
        neighbours.next(LoadReport)
        neighbours.next(LoadReport)
    assert len(answers) == 1


def test_an_idle_router_reports_every_second(
    paths: RuntimePaths, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: now))
    router = manager_of(paths, neighbours, InProcessWorker(ScriptedRunner()))
    reported: list[float] = []
    for _ in range(12):
        router.turn()
        router._tell_of_engine()  # behind what it has reported
        while not isinstance(neighbours.http.recv(30), EngineReady):
            reported.append(now)
        now += 0.25
    assert reported == [100.0, 101.0, 102.0]


def test_requests_still_open_at_shutdown_get_their_final_message(
    paths: RuntimePaths, neighbours: Neighbours
) -> None:
    with running(paths, neighbours, InProcessWorker(ScriptedRunner())):
        neighbours.router.send(behaving(0, SLEEP, max_tokens=100))
        neighbours.item(0, final=False)
    error = neighbours.next(RequestError)
    assert (error.id, error.status) == (0, 503)
    assert "shutting down" in error.message


@contextmanager
def router_process(paths: RuntimePaths) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m moeserve.router` as the launcher starts it."""
    paths.config_file.write_bytes(msgspec.json.encode(to_json_dict(ServerConfig())))
    environment = os.environ | {"MOESERVE_RUNTIME_DIR": str(paths.directory)}
    process = subprocess.Popen([sys.executable, "-m", "moeserve.router"], cwd=REPOSITORY, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_process_from_its_start_to_shutdown(paths: RuntimePaths, neighbours: Neighbours) -> None:
    launcher = PullChannel(neighbours.context, paths.launcher, codec.TO_LAUNCHER)
    with router_process(paths) as process, child_process(paths.worker) as child:
        assert neighbours.next(EngineReady, timeout=30).ready == READY
        assert isinstance(launcher.recv(30), ProcessReady)
        neighbours.router.send(behaving(0, 0, max_tokens=20))
        assert neighbours.item(0, final=True).finish_reason == "length"
        neighbours.report(num_running=0, generation_tokens=20)

        of_router = psutil.Process(process.pid)
        assert comes_to_rest(lambda: sum(of_router.cpu_times()[:2]), 0.01), "an idle router sleeps"

        neighbours.router.send(Shutdown())
        assert process.wait(30) == 0
        assert child.wait(30) == 0


def test_the_process_stops_while_the_worker_still_loads(paths: RuntimePaths, neighbours: Neighbours) -> None:
    launcher = PullChannel(neighbours.context, paths.launcher, codec.TO_LAUNCHER)
    with router_process(paths) as process:
        neighbours.router.send(Shutdown())
        assert process.wait(30) == 0
        assert launcher.drain() == []
