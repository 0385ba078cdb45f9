"""The line between router and worker: a real rpyc server in a real process, over a Unix socket."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import rpyc
from rpyc.core import consts
from rpyc.core.service import VoidService
from rpyc.core.stream import SocketStream

from moeserve.messages import codec, rpc
from moeserve.messages.schema import ReplaceWorker
from moeserve.messages.steps import ExpertUse, StepResult, WorkerError
from moeserve.messages.worker import WorkerClient, WorkerDied
from moeserve.router.replacement import LaunchedWorkers
from moeserve.router.worker_client import RpycWorker
from moeserve.worker.service import WorkerService
from tests.processes.rpc_world import answers_of, connected, plan, results
from tests.support.router.in_process_worker import InProcessWorker
from tests.support.servers.idle import comes_to_rest
from tests.support.servers.rpc_child import (
    EXPERT_USE,
    FLOOD,
    HELD,
    PANIC,
    RAISE,
    READY,
    SLEEP,
    ScriptedRunner,
    child_process,
    let_go,
)
from tests.support.servers.waiting import within


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with child_process(tmp_path / "worker") as process:
        yield process


@pytest.fixture
def worker(child: subprocess.Popen[str], tmp_path: Path) -> Iterator[RpycWorker]:
    worker = RpycWorker(tmp_path / "worker")
    worker.ready()
    yield worker
    worker.close()


def test_ready_says_what_the_router_may_use(child: subprocess.Popen[str], tmp_path: Path) -> None:
    worker = RpycWorker(tmp_path / "worker")
    assert worker.ready() == READY
    worker.shutdown()
    assert child.wait(30) == 0


@pytest.mark.parametrize("kind", ["rpyc", "in process"])
def test_plans_are_executed_in_order_with_two_in_flight(kind: str, request: pytest.FixtureRequest) -> None:
    worker: WorkerClient = (
        request.getfixturevalue("worker") if kind == "rpyc" else InProcessWorker(ScriptedRunner())
    )
    assert worker.poll() == []
    worker.submit(plan(1))
    worker.submit(plan(2))
    answers: list[StepResult] = []
    for step in range(3, 50):
        answers += results(worker, 1)
        worker.submit(plan(step))
    answers += results(worker, 49 - len(answers))
    assert [answer.step for answer in answers] == list(range(1, 50))
    assert worker.poll() == []


@pytest.mark.parametrize("kind", ["rpyc", "in process"])
def test_the_experts_use_comes_between_steps(kind: str, request: pytest.FixtureRequest) -> None:
    worker: WorkerClient = (
        request.getfixturevalue("worker") if kind == "rpyc" else InProcessWorker(ScriptedRunner())
    )
    worker.submit(plan(1))
    worker.request_expert_use()
    worker.submit(plan(2))
    first, use, second = answers_of(worker, 3)
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert use == EXPERT_USE
    assert (first.step, second.step) == (1, 2)


def test_a_failing_count_ends_the_worker_with_its_cause() -> None:
    class Broken(ScriptedRunner):
        def expert_use(self) -> ExpertUse:
            raise FloatingPointError("the counters are on fire")

    service = WorkerService(Broken())
    answer = codec.FROM_WORKER.decode(service.exposed_expert_use())
    assert answer == WorkerError("FloatingPointError: the counters are on fire")
    assert service.is_done
    assert isinstance(service.error, FloatingPointError)


def test_submitting_does_not_wait_for_the_step(worker: RpycWorker, tmp_path: Path) -> None:
    worker.submit(plan(1, HELD))
    worker.submit(plan(2, HELD))
    assert worker.poll() == []
    let_go(tmp_path / "worker")
    assert [result.step for result in results(worker, 2)] == [1, 2]


def test_long_plans_and_long_results_pass_each_other(worker: RpycWorker) -> None:
    """Each is far bigger than the socket's buffer, so two ends that only send would wait for ever."""
    for step in range(1, 4):
        worker.submit(plan(step, FLOOD, prompt=500_000))
    answers = results(worker, 3)
    assert [len(answer.prompt_logprobs[0]) for answer in answers] == [20_000] * 3


def test_a_killed_worker_is_noticed(child: subprocess.Popen[str], worker: RpycWorker) -> None:
    worker.submit(plan(1, HELD))
    child.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerDied, match="gone"):
        results(worker, 1)
    worker.submit(plan(2))
    with pytest.raises(WorkerDied, match="gone"):
        worker.poll()


def test_an_exception_in_a_step_is_told_and_ends_the_worker(
    child: subprocess.Popen[str], worker: RpycWorker
) -> None:
    worker.submit(plan(1, RAISE))
    worker.submit(plan(2))
    with pytest.raises(WorkerDied, match="FloatingPointError: the model is on fire"):
        results(worker, 1)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "Traceback" in stderr
    assert "the model is on fire" in stderr


def test_a_panic_is_told_too_and_ends_nobody_else(child: subprocess.Popen[str], worker: RpycWorker) -> None:
    worker.submit(plan(1, PANIC))
    with pytest.raises(WorkerDied, match="PanicException: index out of bounds"):
        results(worker, 1)
    child.communicate(timeout=60)
    assert child.returncode != 0


def test_an_exception_in_process_is_told_too() -> None:
    worker = InProcessWorker(ScriptedRunner())
    worker.submit(plan(1, RAISE))
    with pytest.raises(WorkerDied, match="on fire"):
        worker.poll()


def test_shutdown_ends_the_worker(child: subprocess.Popen[str], worker: RpycWorker) -> None:
    worker.shutdown()
    assert child.wait(30) == 0


def test_a_worker_that_outlives_routers_is_not_ended_by_one(tmp_path: Path) -> None:
    with child_process(tmp_path / "worker", "outlives routers") as child:
        for step in (1, 2):
            worker = connected(tmp_path / "worker")
            assert worker.ready() == READY
            worker.submit(plan(step))
            assert results(worker, 1)[0].step == step
            worker.shutdown()
        assert within(30, (tmp_path / "worker").exists)
        assert child.poll() is None


def test_the_worker_waits_for_another_router_when_one_goes(
    child: subprocess.Popen[str], worker: RpycWorker, tmp_path: Path
) -> None:
    worker.submit(plan(1, SLEEP))
    worker.close()
    workers = LaunchedWorkers(tmp_path / "worker", launcher=None)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while (another := workers.connect()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert child.poll() is None
    assert another.ready() == worker.ready()
    another.submit(plan(7))
    assert results(another, 1)[0].step == 7
    another.shutdown()
    assert child.wait(30) == 0


def test_a_worker_that_is_given_up_is_not_the_next_one(child: subprocess.Popen[str], tmp_path: Path) -> None:
    """It may listen again until the launcher has ended it."""
    told: list[object] = []

    class Launcher:
        def send(self, message: object) -> None:
            told.append(message)

    workers = LaunchedWorkers(tmp_path / "worker", Launcher())  # type: ignore[arg-type]
    worker = workers.connect()
    assert worker is not None
    worker.close()
    workers.replace(worker.pid, "it answers nonsense")
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert workers.connect() is None
        time.sleep(0.01)
    assert told == [ReplaceWorker(worker.pid, "it answers nonsense")]


def test_nobody_listens_before_the_worker_is_ready(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RpycWorker(tmp_path / "worker")


def test_an_idle_worker_uses_no_cpu(child: subprocess.Popen[str], worker: RpycWorker) -> None:
    worker.submit(plan(1))
    results(worker, 1)
    process = psutil.Process(child.pid)
    assert comes_to_rest(lambda: sum(process.cpu_times()[:2]), 0.01)
    assert comes_to_rest(lambda: process.num_ctx_switches().voluntary, 2)


# -------------------------------------------------------------------- what the line refuses


@pytest.fixture
def line() -> Iterator[tuple[rpyc.Connection, rpyc.Connection]]:
    """Both ends, router's and worker's, each served by a thread, so that either may ask the other."""
    ours, theirs = socket.socketpair()
    router = rpc.connection(VoidService(), rpc.DuplexStream(ours))
    service = WorkerService(ScriptedRunner())
    worker = rpc.connection(service, SocketStream(theirs))
    threads = [threading.Thread(target=end.serve_all) for end in (router, worker)]
    for thread in threads:
        thread.start()
    yield router, worker
    router.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("asking", [0, 1], ids=["router asks worker", "worker asks router"])
def test_pickle_is_refused(line: tuple[rpyc.Connection, rpyc.Connection], asking: int) -> None:
    end = line[asking]
    with pytest.raises(ValueError, match="pickling is disabled"):
        end.sync_request(consts.HANDLE_PICKLE, end.root, 4)
    with pytest.raises(ValueError, match="pickling is disabled"):
        rpyc.classic.obtain(end.root)


@pytest.mark.parametrize("name", ["_runner", "is_done", "error", "__class__", "__init__", "__dict__"])
def test_only_exposed_methods_can_be_reached(
    line: tuple[rpyc.Connection, rpyc.Connection], name: str
) -> None:
    router, _ = line
    with pytest.raises(AttributeError):
        router.sync_request(consts.HANDLE_GETATTR, router.root, name)


def test_nothing_can_be_set_or_deleted(line: tuple[rpyc.Connection, rpyc.Connection]) -> None:
    router, _ = line
    with pytest.raises(AttributeError):
        router.sync_request(consts.HANDLE_SETATTR, router.root, "exposed_step", 1)
    with pytest.raises(AttributeError):
        router.sync_request(consts.HANDLE_DELATTR, router.root, "exposed_step")


def test_bytes_that_are_no_plan_end_the_worker(child: subprocess.Popen[str], tmp_path: Path) -> None:
    worker = RpycWorker(tmp_path / "worker")
    worker.ready()
    worker._remote_step(b"\x80\x04not a plan").add_callback(worker._answers.append)
    with pytest.raises(WorkerDied, match="malformed"):
        results(worker, 1)
    assert child.wait(30) != 0
