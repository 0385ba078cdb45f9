"""One contract for whatever executes plans: a worker process, a runner in this process, the simulator's worker."""

from __future__ import annotations

import inspect
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moeserve.cli.simulate.step_time import StepTime
from moeserve.cli.simulate.worker import Timing, VirtualWorker
from moeserve.messages import codec
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import ExpertUse, NewSeq, Row, StepPlan, StepResult
from moeserve.messages.worker import Worker, WorkerClient, WorkerDied
from moeserve.router.core.limits import Limits
from moeserve.router.worker_client import RpycWorker
from tests.support.router.in_process_worker import InProcessWorker
from tests.support.servers.rpc_child import ANSWER, RAISE, ScriptedRunner, child_process

LIMITS = Limits(256, 4, 128, 64, 100, num_experts=2, experts_per_token=1)
KINDS = ["process", "runner", "simulated"]


@pytest.fixture(params=KINDS)
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    if request.param == "process":
        with child_process(tmp_path / "worker"):
            process = RpycWorker(tmp_path / "worker")
            process.ready()
            yield process
            process.close()
    elif request.param == "runner":
        yield ScriptedRunner()
    else:
        step_time = StepTime("10 ms a step", [0, 1], [0.010, 0.010])
        timing = Timing(frontend=0, reply=0, hop=0, gap=0)
        yield VirtualWorker(LIMITS, step_time, timing, defaultdict(lambda: 100))


def plan(step: int, behaviour: int = ANSWER, prompt: int = 4) -> StepPlan:
    tokens = array("i", [step, behaviour, *range(2, prompt)])
    new = NewSeq(0, tokens.tobytes(), prompt, b"", SamplingParams(max_tokens=3))
    return StepPlan(step, [new], [Row(0, 0, prompt, array("i", range(prompt)).tobytes(), True)])


def decode(step: int) -> StepPlan:
    return StepPlan(step, [], [Row(0, step + 2, 1, array("i", [step + 2]).tobytes(), True)])


def test_every_kind_is_a_worker(worker: Worker) -> None:
    assert isinstance(worker, Worker)


def test_ready_is_the_same_at_every_call(worker: Worker) -> None:
    ready = worker.ready()
    assert (ready.num_kv_slots, ready.max_num_seqs, ready.max_model_len) == (256, 4, 128)
    assert worker.ready() == ready


def test_each_step_answers_its_own_plan_and_leaves_it_alone(worker: Worker) -> None:
    for message in (plan(1), decode(2), decode(3)):
        before = codec.encode(message)
        result = worker.step(message)
        assert isinstance(result, StepResult)
        assert result.step == message.step
        assert len(result.sampled) == sum(row.sample for row in message.rows)
        assert result.compute_ms > 0
        assert result.idle_ms >= 0
        assert codec.encode(message) == before


def test_expert_use_comes_between_steps(worker: Worker) -> None:
    worker.step(plan(1))
    use = worker.expert_use()
    assert isinstance(use, ExpertUse)
    assert (len(use.tokens), len(use.on_gpu)) == (8 * use.layers * use.experts, use.layers * use.experts)
    assert worker.step(decode(2)).step == 2


def test_an_exception_of_the_runner_arrives_as_a_dead_worker(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="on fire"):
        ScriptedRunner().step(plan(1, RAISE))
    with child_process(tmp_path / "worker"):
        process = RpycWorker(tmp_path / "worker")
        process.ready()
        with pytest.raises(WorkerDied, match="FloatingPointError: the model is on fire"):
            process.step(plan(1, RAISE))
        process.close()


@pytest.mark.parametrize("kind", [RpycWorker, ScriptedRunner, VirtualWorker])
def test_the_calls_have_the_signatures_of_the_protocol(kind: type[Worker]) -> None:
    for name in ("ready", "step", "expert_use"):
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Worker, name)), name


@pytest.mark.parametrize("kind", [RpycWorker, InProcessWorker])
def test_the_clients_have_the_signatures_of_the_protocol(kind: type[WorkerClient]) -> None:
    for name in ("ready", "submit", "request_expert_use", "poll", "fileno", "shutdown", "close"):
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(WorkerClient, name)), name


def test_a_worker_without_a_call_cannot_be_made() -> None:
    class NoStep(Worker):
        def ready(self) -> msgspec.UnsetType:  # type: ignore[override]
            return msgspec.UNSET

        def expert_use(self) -> ExpertUse:
            return ExpertUse(0, 0, 0, b"", b"")

    with pytest.raises(TypeError, match="step"):
        NoStep()  # type: ignore[abstract]
    assert not isinstance(object(), Worker)
