"""What httpserver makes of a lost router or detokenizer: it sends again what its clients wait for."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import pytest

from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.observability.load_totals import LoadTotals
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.metric import HistogramCounts
from moeserve.messages.pages import TierCounts
from moeserve.messages.router_metrics import STEP_BOUNDS_MS, LoadReport
from moeserve.messages.sampling import SamplingParams, TextOptions, TokenLogprob
from moeserve.messages.schema import (
    Abort,
    EngineReady,
    EngineReadyRequest,
    GenerateBatch,
    GenerateRequest,
    Heartbeat,
    ProcessLost,
    Resumed,
    TextItem,
    TextOut,
    Usage,
)
from moeserve.messages.steps import WorkerReady

READY = WorkerReady(1000, 8, 100, 50, 0, 0, "a test")
USAGE = Usage(2, 4, 0, 1.0, 2.0, 3.0)


class Router:
    """Both sockets: what the engine client sends, and what it is to receive."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()

    async def send(self, message: object) -> None:
        self.sent.append(message)

    def reopen(self) -> None:
        self.sent.clear()

    async def recv(self) -> Any:
        return await self.inbox.get()

    @property
    def requests(self) -> list[GenerateRequest]:
        found: list[GenerateRequest] = []
        for message in self.sent:
            match message:
                case GenerateRequest():
                    found.append(message)
                case GenerateBatch():
                    found += message.unpacked()
        return found


Scene = Callable[[EngineClient, Router], Awaitable[None]]


def play(scene: Scene, *, continue_requests: bool = True, first_id: int = 1, ready: bool = True) -> None:
    async def run() -> None:
        router = Router()
        engine = EngineClient(
            router,  # type: ignore[arg-type]
            router,  # type: ignore[arg-type]
            Metrics("m"),
            continue_requests=continue_requests,
            first_id=first_id,
            state=EngineState(text_ready=True, ready=READY if ready else None),
        )
        reading = asyncio.create_task(engine.run())
        await scene(engine, router)
        assert not reading.done()
        reading.cancel()
        await engine.flush()

    asyncio.run(run())


def request(engine: EngineClient, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=4, **sampling)
    return GenerateRequest(engine.next_id(), array("i", [1, 2]).tobytes(), params, TextOptions(), 0.0)


def started(engine: EngineClient, choices: int = 1) -> GenerationStream:
    return GenerationStream(engine, [request(engine) for _ in range(choices)], Caller(0.0))


async def tell(router: Router, *messages: object) -> None:
    for message in messages:
        router.inbox.put_nowait(message)
    while not router.inbox.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def text(id: int, token: int, **fields: Any) -> TextOut:
    return TextOut([TextItem(id, f"<{token}>", [token], **fields)])


def lost(process: Literal["router", "detokenizer"], *, by_itself: bool = False) -> ProcessLost:
    return ProcessLost(process, "signal 9", by_itself)


async def texts(stream: GenerationStream) -> list[str]:
    return [item.text async for _, item in stream]


def test_a_lost_router_gets_what_a_client_has_and_the_client_nothing_twice() -> None:
    async def scene(engine: EngineClient, router: Router) -> None:
        asked = request(engine, prompt_logprobs=0)
        async with GenerationStream(engine, [asked], Caller(0.0)) as stream:
            scored = [TokenLogprob(2, -1.0, 1, (), ())]
            await tell(
                router,
                TextOut([TextItem(asked.id, "", [], prompt_logprobs=scored)]),
                text(asked.id, 7, cached_tokens=1),
                text(asked.id, 8),
            )
            await tell(router, lost("router"))
            assert engine.state.health()["status"] == "restarting"
            assert engine.state.require_ready()  # who comes now waits
            asks_again, again = router.sent
            assert asks_again == EngineReadyRequest()
            assert again.id != asked.id
            assert again.token_ids == asked.token_ids
            assert again.resumed.first_token_at > 0
            so_far = Resumed(array("i", [7, 8]).tobytes(), 1, 1, again.resumed.first_token_at)
            assert again.resumed == so_far
            await tell(router, EngineReady(READY), text(asked.id, 8), text(again.id, 9))
            assert engine.state.health()["status"] == "ok"
            await tell(router, lost("router"))
            _, third = router.sent
            assert third.resumed.token_ids == array("i", [7, 8, 9]).tobytes()
            await tell(router, text(third.id, 5, finish_reason="length", usage=USAGE))
            assert await texts(stream) == ["", "<7>", "<8>", "<9>", "<5>"]

    play(scene)


def test_a_router_that_was_ready_before_its_predecessors_loss_was_told_is_asked_again() -> None:
    """The launcher and the router send on different connections, so their messages arrive in any order."""

    async def scene(engine: EngineClient, router: Router) -> None:
        await tell(router, EngineReady(READY), lost("router"))
        assert engine.state.health()["status"] == "restarting"
        assert router.sent == [EngineReadyRequest()]
        await tell(router, EngineReady(READY))
        assert engine.state.health()["status"] == "ok"

    play(scene)


def test_a_lost_detokenizers_requests_are_ended_at_the_router_and_begun_again() -> None:
    async def scene(engine: EngineClient, router: Router) -> None:
        async with started(engine, 2) as stream:
            first, second = router.requests
            await tell(router, text(first.id, 7), lost("detokenizer"))
            assert engine.state.health()["status"] == "restarting"
            told = router.sent[1:]  # behind the batch
            assert [type(message) for message in told] == [Abort, Abort, GenerateBatch]
            assert [message.id for message in told[:2]] == [first.id, second.id]
            resent = told[2].unpacked()
            assert [again.resumed.token_ids for again in resent] == [array("i", [7]).tobytes(), b""]
            for again in resent:
                await tell(router, text(again.id, 3, finish_reason="stop", usage=USAGE))
            await tell(router, Heartbeat("detokenizer"))
            assert engine.state.health()["status"] == "ok"
            assert len(await texts(stream)) == 3

    play(scene)


def test_an_httpserver_that_replaces_another_is_well_once_it_has_heard_the_detokenizer() -> None:
    """It was stopped with the one before, perhaps: until it says something, /health must not be 200."""

    async def scene(engine: EngineClient, router: Router) -> None:
        await tell(router, EngineReady(READY, []))
        assert engine.state.health()["status"] == "restarting"
        assert "detokenizer" in engine.state.health()["cause"]
        await tell(router, Heartbeat("detokenizer"))
        assert engine.state.health()["status"] == "ok"

    play(scene, first_id=(1 << 40) + 1, ready=False)


def test_a_client_that_leaves_after_a_loss_is_aborted_under_the_new_id() -> None:
    async def scene(engine: EngineClient, router: Router) -> None:
        async with started(engine):
            await tell(router, lost("router"))
            (again,) = router.requests
        await engine.flush()
        assert router.sent[-1] == Abort(again.id)

    play(scene)


def test_what_was_open_at_two_crashes_without_a_token_between_ends() -> None:
    async def scene(engine: EngineClient, router: Router) -> None:
        async with (
            started(engine) as suspect,
            started(engine) as other,
        ):
            for _ in range(6):  # somebody's kills blame nobody
                await tell(router, lost("detokenizer"))
            await tell(router, lost("router", by_itself=True))
            await tell(router, text(router.requests[1].id, 7))
            await tell(router, lost("router", by_itself=True))
            with pytest.raises(ApiError, match="the router was lost: signal 9"):
                await texts(suspect)
            (again,) = router.requests
            await tell(router, text(again.id, 8, finish_reason="stop", usage=USAGE))
            assert await texts(other) == ["<7>", "<8>"]

    play(scene)


def test_without_continuation_what_has_begun_ends_and_the_rest_is_served() -> None:
    async def scene(engine: EngineClient, router: Router) -> None:
        async with (
            started(engine) as begun,
            started(engine) as waiting,
        ):
            await tell(router, text(router.requests[0].id, 7), lost("detokenizer"))
            with pytest.raises(ApiError, match="the detokenizer was lost"):
                await texts(begun)
            await tell(router, text(router.requests[-1].id, 7, finish_reason="stop", usage=USAGE))
            assert await texts(waiting) == ["<7>"]

    play(scene, continue_requests=False)


def step_times(*counts: int) -> HistogramCounts:
    """counts: of the first bounds."""
    times = HistogramCounts.empty(STEP_BOUNDS_MS)
    times.counts[: len(counts)] = counts
    times.sum = float(sum(counts))
    return times


def reports() -> Iterator[LoadReport]:
    for steps in (3, 5):
        yield LoadReport(
            num_running=2,
            num_waiting=1,
            kv_slots_used=7,
            kv_slots_total=1000,
            prompt_tokens=10,
            generation_tokens=20,
            steps=steps,
            engine_losses=1,
            decode_step_ms=step_times(steps, 1),
        )


def test_the_counts_of_routers_are_added_and_their_gauges_are_the_last_ones() -> None:
    totals = LoadTotals()
    first, second = reports()
    assert totals.of(first) == first
    assert totals.of(second) == second
    totals.start_again()
    totals.lost(num_continued=4)
    both = totals.of(first)
    assert (both.steps, both.prompt_tokens, both.engine_losses, both.continued) == (8, 20, 3, 4)
    assert (both.num_running, both.kv_slots_used, both.kv_slots_total) == (2, 7, 1000)
    assert both.decode_step_ms == step_times(8, 2)
    assert both.prefill_step_ms == first.prefill_step_ms


def test_no_total_falls_when_a_router_is_replaced() -> None:
    """The tiers' and the windows' totals included."""
    report = LoadReport(
        window_hits=3,
        window_evictions=2,
        disk=TierCounts(7, 100, 200, 30, 1.5, 4, 5),
        ram=TierCounts(8, 10, 20, 3, 0.5, 1, 2),
        expert_cache=ExpertCacheCounts(1, 2, 3, 4),
    )
    totals = LoadTotals()
    totals.of(report)
    totals.start_again()
    now = totals.of(LoadReport(ram=TierCounts(6)))
    assert (now.window_hits, now.window_evictions) == (3, 2)
    assert now.disk == TierCounts(0, 100, 200, 30, 1.5, 4, 5)
    assert now.ram == TierCounts(6, 10, 20, 3, 0.5, 1, 2)
    assert now.expert_cache == ExpertCacheCounts(1, 2, 3, 4)
