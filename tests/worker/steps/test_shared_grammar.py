"""A grammar of many choices is sent once to the router, once to the worker, and held once by each."""

from __future__ import annotations

import asyncio
from array import array

from moeserve.grammar.spec import Choice
from moeserve.grammar.translate import to_grammar
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.messages import codec
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import Abort, EngineReadyRequest, GenerateBatch, GenerateRequest, ProcessLost
from moeserve.messages.steps import StepPlan, StepResult
from moeserve.router.core.scheduler import Scheduler
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.runner import Runner
from tests.conftest import TINY_MODEL
from tests.gpu.driver import small_config
from tests.support.worker.beams import scheduler_of

CHOICES = 6
GRAMMAR = to_grammar(Choice([f"a long word {i:04}" for i in range(1000)]))
SMALL = 400 * CHOICES  # bytes of all that is not the grammar, at most


def choices(engine: EngineClient) -> list[GenerateRequest]:
    """Choices of two prompts."""
    return [
        GenerateRequest(
            engine.next_id(),
            array("i", [5 + i % 2, 7, 9]).tobytes(),
            SamplingParams(max_tokens=6, seed=i, grammar=GRAMMAR),
            TextOptions(),
            0.0,
        )
        for i in range(CHOICES)
    ]


class Line:
    """To a router: what is sent, as its bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send(self, message: GenerateBatch | Abort) -> None:
        self.sent.append(codec.encode(message))

    def reopen(self) -> None:
        self.sent.clear()


class Worker:
    """The real one, and the bytes of the plans that it gets."""

    def __init__(self) -> None:
        self.runner = runner()
        self.num_bytes = 0

    def step(self, plan: StepPlan) -> StepResult:
        frame = codec.encode(plan)
        self.num_bytes += len(frame)
        return self.runner.step(codec.STEP_PLAN.decode(frame))


def runner() -> Runner:
    return load_cpu_runner(small_config(TINY_MODEL), lambda *_: None)


def run(scheduler: Scheduler, worker: Worker, steps: int) -> None:
    for _ in range(steps):
        if (plan := scheduler.plan(0.0)) is None:
            return
        scheduler.step_result(worker.step(plan), 0.0)


def test_httpserver_sends_it_once_and_once_more_to_another_router() -> None:
    line = Line()

    async def ask() -> None:
        engine = EngineClient(line, None, Metrics("m"), state=EngineState(True, ready=runner_ready))  # type: ignore[arg-type]
        async with GenerationStream(engine, choices(engine), Caller(0.0)):
            (frame,) = line.sent
            assert len(frame) < len(GRAMMAR) + SMALL
            await engine._process_lost(ProcessLost("router", "signal 9", by_itself=False))
            asked, frame = line.sent
            assert codec.TO_ROUTER.decode(asked) == EngineReadyRequest()
            assert len(frame) < len(GRAMMAR) + SMALL
        await engine.flush()

    runner_ready = runner().ready()
    asyncio.run(ask())


def test_router_and_worker_have_it_once_until_the_last_choice_ends() -> None:
    worker = Worker()
    scheduler = scheduler_of(worker.runner)
    engine = EngineClient(Line(), None, Metrics("m"))  # type: ignore[arg-type]
    batch = codec.TO_ROUTER.decode(codec.encode(GenerateBatch.of(choices(engine))))
    assert isinstance(batch, GenerateBatch)
    requests = batch.unpacked()
    assert {id(request.sampling.grammar) for request in requests} == {id(requests[0].sampling.grammar)}
    for request in requests[:-1]:
        scheduler.add(request)
    run(scheduler, worker, 2)
    scheduler.add(requests[-1])  # a later step binds it
    run(scheduler, worker, 2)
    assert worker.runner._orders.grammars == {1: GRAMMAR}
    assert len(worker.runner._constraints._compiler._compiled) == 1
    assert worker.num_bytes < len(GRAMMAR) + 4 * SMALL

    scheduler.worker_lost("signal 9")
    scheduler.worker_ready("signal 9", crashed_by_itself=False)
    worker = Worker()
    run(scheduler, worker, 100)
    assert not scheduler.num_open
    assert worker.num_bytes < len(GRAMMAR) + 8 * SMALL
    assert worker.runner._orders.grammars == {2: GRAMMAR}

    other = SamplingParams(max_tokens=1, seed=1)
    scheduler.add(GenerateRequest(engine.next_id(), bytes(4), other, TextOptions(), 0.0))
    run(scheduler, worker, 1)
    assert worker.runner._orders.grammars == {}
