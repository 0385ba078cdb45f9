"""Lines of batches behind the requests of several models: which models are loaded for them. In virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from moeserve.front.line_lease import lease_for_line
from moeserve.front.pool import ModelPool
from moeserve.front.schedule import LINES_PATIENCE_S, LINES_TURN_S
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock


async def line(pool: ModelPool, name: str, seconds: float = 0.5) -> float:
    """Answers a line, again if its model made room meanwhile. Returns the seconds until its answer began."""
    came = pool.now
    model = pool.find(name)
    while True:
        async with lease_for_line(pool, model):
            began = pool.now
            try:
                async with asyncio.timeout(seconds):
                    await model.sends_lines_back.wait()
            except TimeoutError:
                return began - came


def test_lines_use_what_is_free_or_loaded() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(), b=Script())

    async def work() -> list[float]:
        waited = [await line(pool, "a")]
        return [*waited, *await asyncio.gather(*(line(pool, name) for name in "aabb"))]

    assert run(clock, pool, work()) == pytest.approx([2.01, 0, 0, 2.01, 2.01])
    assert world.history == ["a", "b"]


def test_an_idle_model_makes_room_after_a_while() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script())

    async def work() -> float:
        await request(pool, "a", 0.0)
        waiting = asyncio.create_task(line(pool, "b"))
        await asyncio.sleep(20)
        await request(pool, "a", 1.0)
        idle_since = pool.now
        await waiting
        return pool.now - idle_since

    taken = run(clock, pool, work())
    assert taken == pytest.approx(LINES_PATIENCE_S + 0.1 + 2.0 + 0.5, abs=0.05)
    assert world.history == ["a", "b"]


def test_requests_send_lines_back() -> None:
    """Lines hold a model whose memory a request needs: it is not kept waiting for them, nor are they lost."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script())

    async def work() -> float:
        long = [asyncio.create_task(line(pool, "a", 600.0)) for _ in range(4)]
        await asyncio.sleep(60)
        waited = await request(pool, "b")
        await asyncio.gather(*long)
        return waited

    assert run(clock, pool, work()) == pytest.approx(0.1 + 2.0, abs=0.05)
    assert world.history == ["a", "b", "a"]


def test_a_request_takes_the_place_of_a_load_for_lines() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(load_s=100.0), b=Script())

    async def work() -> float:
        waiting = asyncio.create_task(line(pool, "a"))
        await asyncio.sleep(1)
        waited = await request(pool, "b")
        await waiting
        return waited

    assert run(clock, pool, work()) < 3
    assert world.history == ["a", "b", "a"]


def test_batches_for_several_models_take_turns() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script(), c=Script())
    ended: dict[str, float] = {}

    async def batch(name: str) -> None:
        for _ in range(1000):
            await line(pool, name, 1.0)
        ended[name] = pool.now

    async def work() -> None:
        await asyncio.gather(*map(batch, "abc"))

    run(clock, pool, work())
    assert set(ended) == set("abc")
    assert max(ended.values()) < 3000 * (1 + 20 / LINES_TURN_S)
    assert len(world.history) < 3000 / LINES_TURN_S + 3
    assert world.history[:6] == ["a", "b", "c", "a", "b", "c"]


def test_a_model_with_lines_is_not_unloaded_for_being_idle() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, idle_limit=5.0, a=Script())

    async def work() -> None:
        await line(pool, "a", 60.0)
        assert world.loaded == ["a"]
        await asyncio.sleep(4)
        assert world.loaded == ["a"]
        await asyncio.sleep(2)
        assert world.loaded == []

    run(clock, pool, work())
    assert world.history == ["a"]


def test_what_cannot_be_loaded_refuses_its_lines() -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 1, bad=Script(failure="no"), large=Script(need=2))

    async def work() -> list[int]:
        statuses = []
        for name in ("bad", "bad", "large"):
            with pytest.raises(ApiError) as refused:
                await line(pool, name)
            statuses.append(refused.value.status)
        return statuses

    assert run(clock, pool, work()) == [503, 503, 400]


@pytest.mark.parametrize("seed", range(4))
def test_requests_wait_no_longer_for_lines(seed: int) -> None:
    """Random requests and lines on four models, memory for two: none is lost, and no request waits behind lines."""
    chance = random.Random(seed)
    clock = Clock()
    scripts = {name: Script(load_s=chance.uniform(1, 8)) for name in "abcd"}
    pool, _ = pool_of(clock, 2, **scripts)  # type: ignore[arg-type]
    answered = []

    async def client() -> None:
        for _ in range(20):
            name = chance.choice("abcd")
            await request(pool, name, chance.expovariate(1.0))
            answered.append(name)
            await asyncio.sleep(chance.expovariate(0.05))

    async def lines() -> None:
        for _ in range(20):
            name = chance.choice("abcd")
            await line(pool, name, chance.expovariate(0.1))
            answered.append(name)

    async def cancelled() -> None:
        for _ in range(20):
            task = asyncio.create_task(line(pool, chance.choice("abcd"), 5.0))
            await asyncio.sleep(chance.expovariate(0.1))
            task.cancel()
            await asyncio.wait((task,))

    async def work() -> None:
        await asyncio.gather(*(client() for _ in range(3)), *(lines() for _ in range(6)), cancelled())

    run(clock, pool, work())
    assert len(answered) == 9 * 20
    assert max(model.most_swaps_waited for model in pool.models) <= 3
    assert all(model.num_lines == 0 and not model.line_tickets for model in pool.models)
