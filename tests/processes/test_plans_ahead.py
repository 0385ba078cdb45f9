"""A worker that launches the next plan while it computes one, over a real line: the order of the answers, and ends."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moeserve.messages.steps import StepPlan, StepResult
from moeserve.messages.worker import WorkerDied
from moeserve.router.worker_client import RpycWorker
from tests.processes.rpc_world import answers_of, connected, plan, results
from tests.support.servers.rpc_child import EXPERT_USE, RAISE, child_process, let_go


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with child_process(tmp_path / "worker", "overlapping") as process:
        yield process


@pytest.fixture
def worker(child: subprocess.Popen[str], tmp_path: Path) -> Iterator[RpycWorker]:
    worker = started(tmp_path / "worker")
    yield worker
    worker.close()


def started(path: Path) -> RpycWorker:
    """What a start has put off is done behind a first call."""
    worker = RpycWorker(path)
    worker.ready()
    let_go(path)
    worker.submit(plan(0))
    results(worker, 1)
    path.with_suffix(".go").unlink()
    return worker


def going_on(step: int) -> StepPlan:
    """A plan of rows alone."""
    return msgspec.structs.replace(plan(step), new_seqs=[])


def launched_before_the_result(answers: list[StepResult]) -> list[int]:
    return [int(answer.compute_ms) for answer in answers]


def test_the_next_plan_is_launched_while_one_is_computed(worker: RpycWorker, tmp_path: Path) -> None:
    worker.submit(plan(1))
    worker.submit(going_on(2))
    answers: list[StepResult] = []
    for step in range(3, 9):
        answers += results(worker, 1)
        worker.submit(going_on(step))
    answers += results(worker, 1)
    let_go(tmp_path / "worker")
    answers += results(worker, 1)
    assert [answer.step for answer in answers] == list(range(1, 9))
    assert launched_before_the_result(answers) == [2, 3, 4, 5, 6, 7, 8, 8]
    worker.submit(going_on(9))  # nothing is left over
    assert [answer.step for answer in results(worker, 1)] == [9]
    assert worker.poll() == []


def test_a_result_does_not_wait_for_the_rest_of_the_next_plan(tmp_path: Path) -> None:
    """The rest may be sampling that waits for the mask to which this result's token leads."""
    path = tmp_path / "worker"
    with child_process(path, "overlapping", "seen"):
        worker = started(path)
        worker.submit(going_on(1))
        for step in range(1, 5):
            worker.submit(going_on(step + 1))
            (result,) = results(worker, 1)
            assert launched_before_the_result([result]) == [step + 1]
            path.with_suffix(f".{step}").touch()
        let_go(path)
        results(worker, 1)
        worker.close()


def test_a_plan_that_is_there_is_launched_before_the_result_is_sent(tmp_path: Path) -> None:
    """As behind a step with drafts, whose tokens are read where the rest of its launching is."""
    path = tmp_path / "worker"
    with child_process(path, "overlapping", "seen"):
        worker = started(path)
        worker.submit(going_on(1))
        worker.submit(going_on(2))
        answers = results(worker, 1)  # the rest of step 2 now waits
        worker.submit(going_on(3))
        let_go(path)
        for step in (1, 2):
            path.with_suffix(f".{step}").touch()
        answers += results(worker, 2)
        assert launched_before_the_result(answers) == [2, 3, 3]
        worker.close()


def test_a_plan_with_a_new_sequence_waits_for_the_one_before(worker: RpycWorker, tmp_path: Path) -> None:
    worker.submit(going_on(1))
    worker.submit(plan(2))
    (first,) = results(worker, 1)
    let_go(tmp_path / "worker")
    (second,) = results(worker, 1)
    assert launched_before_the_result([first, second]) == [1, 2]


def test_other_calls_are_executed_and_answered_between_their_steps(
    worker: RpycWorker, tmp_path: Path
) -> None:
    worker.submit(going_on(1))
    worker.request_expert_use()
    worker.submit(going_on(2))
    worker.submit(StepPlan(3, [], []))
    worker.submit(going_on(4))
    first, use, second, third = answers_of(worker, 4)
    let_go(tmp_path / "worker")
    (fourth,) = answers_of(worker, 1)
    assert use == EXPERT_USE
    steps = [answer.step for answer in (first, second, third, fourth) if isinstance(answer, StepResult)]
    assert steps == [1, 2, 3, 4]


def test_a_failure_of_a_plan_that_was_launched_ahead_is_told(
    child: subprocess.Popen[str], worker: RpycWorker
) -> None:
    worker.submit(plan(1, RAISE))
    worker.submit(going_on(2))
    with pytest.raises(WorkerDied, match="FloatingPointError: the model is on fire"):
        results(worker, 2)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "the model is on fire" in stderr


@pytest.mark.parametrize("submitted", [1, 2])
def test_a_router_that_goes_meanwhile_is_not_the_last(
    submitted: int, child: subprocess.Popen[str], worker: RpycWorker, tmp_path: Path
) -> None:
    for step in range(1, 1 + submitted):
        worker.submit(going_on(step))
    worker.close()
    let_go(tmp_path / "worker")
    another = connected(tmp_path / "worker")
    assert child.poll() is None
    another.ready()
    another.submit(plan(7))
    assert results(another, 1)[0].step == 7
    another.shutdown()
    assert child.wait(30) == 0


def test_shutdown_ends_a_worker_that_computes(
    child: subprocess.Popen[str], worker: RpycWorker, tmp_path: Path
) -> None:
    worker.submit(going_on(1))
    worker.submit(going_on(2))
    threading.Timer(0.2, let_go, (tmp_path / "worker",)).start()
    worker.shutdown()
    assert child.wait(30) == 0
