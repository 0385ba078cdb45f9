"""Turns of models that share memory: when a model is loaded, gives way, and is waited for. In virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from moeserve.front.schedule import MIN_TURN_S, State
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock


def test_a_model_is_loaded_by_its_first_request_and_stays() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(), b=Script())

    async def work() -> list[float]:
        return [await request(pool, "a"), await request(pool, "a"), await request(pool, "b")]

    first, second, other = run(clock, pool, work())
    assert first == pytest.approx(2.01)
    assert second == 0.0
    assert other == pytest.approx(2.01)
    assert world.history == ["a", "b"]
    assert world.loaded == [], "the end stops all"


def test_running_answers_end_by_themselves() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script())

    async def work() -> float:
        long = asyncio.create_task(request(pool, "a", 60.0))
        await asyncio.sleep(3)
        waited = await request(pool, "b")
        assert long.done()
        return waited

    # From second 3 until second 62.01, when the answer has ended; then the end of one and the load of the other.
    assert run(clock, pool, work()) == pytest.approx(59.01 + 0.1 + 2.0, abs=0.05)
    assert world.history == ["a", "b"]


def test_a_busy_model_gives_way_after_its_turn() -> None:
    """A model that always has requests would keep every other out for ever."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(load_s=1.0), b=Script())

    async def without_end() -> None:
        while True:
            await request(pool, "a", 0.1)

    async def work() -> tuple[float, float]:
        busy = [asyncio.create_task(without_end()) for _ in range(3)]
        await asyncio.sleep(1.5)
        waited = await request(pool, "b")
        waited_again = await request(pool, "a")
        for task in busy:
            task.cancel()
        await asyncio.wait(busy)
        return waited, waited_again

    waited, waited_again = run(clock, pool, work())
    assert MIN_TURN_S - 1 < waited < MIN_TURN_S + 4
    assert waited_again < 5, "the other had one request, and is idle: it makes room at once"
    assert world.history == ["a", "b", "a"]


def test_a_turn_is_at_least_as_long_as_the_load() -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(load_s=60.0), b=Script(load_s=60.0))
    shares = {"a": 0.0, "b": 0.0}

    async def client(name: str) -> None:
        while clock.now < 2000:
            await request(pool, name, 0.5)
            shares[name] += 0.5

    async def work() -> None:
        await asyncio.gather(client("a"), client("b"))

    run(clock, pool, work())
    assert sum(shares.values()) > 0.45 * 2000, "loading takes half of the time at most"
    assert min(shares.values()) > 0.4 * sum(shares.values()), "and both get as much"


@pytest.mark.parametrize("seed", range(6))
def test_no_model_waits_longer_than_its_place_and_none_is_lost(seed: int) -> None:
    """Eight clients on four models at random, memory for two (or models of different sizes)."""
    chance = random.Random(seed)
    clock = Clock()
    sizes = [1, 1, 1, 1] if seed % 2 else [1, 2, 2, 1]
    scripts = {
        name: Script(need=size, load_s=chance.uniform(1, 8)) for name, size in zip("abcd", sizes, strict=True)
    }
    pool, world = pool_of(clock, 2, **scripts)  # type: ignore[arg-type]
    answered = []

    async def client() -> None:
        for _ in range(30):
            name = chance.choice("abcd")
            await request(pool, name, chance.expovariate(1.0))
            answered.append(name)
            await asyncio.sleep(chance.expovariate(2.0))

    async def work() -> None:
        await asyncio.gather(*(client() for _ in range(8)))

    run(clock, pool, work())
    assert len(answered) == 240
    assert max(model.most_swaps_waited for model in pool.models) <= 3
    assert pool.num_swaps == len(world.history) > 4


def test_a_load_whose_clients_have_gone_makes_room() -> None:
    """llama-swap's users wait for the load of a model that they asked for by mistake."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(load_s=100.0), b=Script())

    async def work() -> float:
        wrong = asyncio.create_task(request(pool, "a"))
        await asyncio.sleep(1)
        wrong.cancel()
        return await request(pool, "b")

    assert run(clock, pool, work()) < 3
    assert world.history == ["a", "b"]
    assert pool.find("a").num_failures == 0


def test_a_load_that_is_wanted_is_never_given_up() -> None:
    """llama.cpp#25528: a model that was loading was evicted."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(load_s=10.0), b=Script())

    async def work() -> list[float]:
        first = asyncio.create_task(request(pool, "a"))
        await asyncio.sleep(1)
        return list(await asyncio.gather(first, request(pool, "b")))

    run(clock, pool, work())
    assert world.history == ["a", "b"]


def test_a_model_stays_if_those_who_wanted_its_room_have_gone() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script())

    async def work() -> float:
        long = asyncio.create_task(request(pool, "a", 100.0))
        await asyncio.sleep(20)  # its turn is over
        other = asyncio.create_task(request(pool, "b"))
        await asyncio.sleep(1)
        assert pool.find("a").state is State.CLOSING
        other.cancel()
        await asyncio.sleep(0.1)
        waited = await request(pool, "a")
        await long
        return waited

    assert run(clock, pool, work()) == 0.0
    assert world.history == ["a"]


def test_work_behind_a_request_keeps_its_model_loaded() -> None:
    """A response that is made in the background goes on when its request has been answered."""
    clock = Clock()
    pool, world = pool_of(clock, 1, idle_limit=5.0, a=Script(), b=Script())

    async def work() -> float:
        model = pool.find("a")
        async with pool.lease(model) as instance:
            pool.hold(model, instance, asyncio.sleep(100))
        await asyncio.sleep(50)
        assert world.loaded == ["a"], "it is not idle"
        return await request(pool, "b")

    assert run(clock, pool, work()) == pytest.approx(50 + 0.1 + 2.0, abs=0.05)
    assert world.history == ["a", "b"]
