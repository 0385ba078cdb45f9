"""Races by which other servers of several models are known to stall, each as it was reported: a request meets an
unload, an eviction or another load at the wrong moment. In virtual time, without processes."""

from __future__ import annotations

import asyncio
import random

import pytest

from moeserve.front.schedule import State
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock

LOAD_S = 2.0
STOP_S = 0.5
MOMENTS = [STOP_S * part / 4 for part in range(-2, 7)]  # around an unload's begin and end


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_meets_the_unload_of_its_idle_model(moment: float) -> None:
    """mostlygeek/llama-swap#946: no model of the group was started any more."""
    clock = Clock()
    pool, world = pool_of(clock, 1, idle_limit=10.0, a=Script(stop_s=STOP_S), b=Script())

    async def work() -> None:
        await request(pool, "a")
        await asyncio.sleep(10 + moment)
        assert await request(pool, "a") <= LOAD_S + STOP_S + 0.1
        await request(pool, "b")

    run(clock, pool, work())
    assert world.history[-1] == "b"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_meets_the_stop_of_a_model_that_makes_room(moment: float) -> None:
    """ggml-org/llama.cpp#28698: it was sent to the process that ended. ollama/ollama#17408: the model that was to make
    room came back to life, and nothing was ever loaded again."""
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(stop_s=STOP_S), b=Script(stop_s=STOP_S))

    async def work() -> tuple[float, float]:
        await request(pool, "a")
        await asyncio.sleep(30)
        other = asyncio.create_task(request(pool, "b"))
        await asyncio.sleep(max(0.0, moment))
        back = asyncio.create_task(request(pool, "a"))
        return await asyncio.gather(other, back)

    assert max(run(clock, pool, work())) < 30


def test_two_models_are_wanted_at_once_where_one_fits() -> None:
    """ggml-org/llama.cpp#28443: one of them was loaded, the other waited for ever."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script(), c=Script())

    async def work() -> None:
        await request(pool, "a")
        await asyncio.gather(*(request(pool, name) for name in "bc"))

    run(clock, pool, work())
    assert sorted(world.history) == ["a", "b", "c"]


def test_a_model_that_never_rests_lets_another_have_its_turn() -> None:
    """ollama/ollama#14407: new requests replaced those that ended, and the unload that was wanted never came."""
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(), b=Script())
    ending = asyncio.Event()

    async def client() -> None:
        while not ending.is_set():
            await request(pool, "a", 3.0)

    async def work() -> float:
        clients = [asyncio.create_task(client()) for _ in range(8)]
        await asyncio.sleep(20)
        waited = await request(pool, "b")
        ending.set()
        await asyncio.gather(*clients)
        return waited

    assert run(clock, pool, work()) < 20


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_leave_during_loads_leave_nothing_behind(seed: int) -> None:
    """ollama/ollama#10819: processes of models that were wanted no longer were forgotten, and their memory with them.
    (The scripted models check that no two servers of a model run, nor more than fit.)"""
    clock = Clock()
    a, b, c = (Script(load_s=seconds, stop_s=STOP_S) for seconds in (1.0, 2.0, 3.0))
    pool, world = pool_of(clock, 2, a=a, b=b, c=c)
    chance = random.Random(seed)

    async def impatient(name: str) -> None:
        waiting = asyncio.create_task(request(pool, name, chance.random()))
        await asyncio.sleep(3 * chance.random())
        waiting.cancel()
        await asyncio.wait((waiting,))

    async def work() -> None:
        for _ in range(40):
            await asyncio.gather(*(impatient(chance.choice("abc")) for _ in range(3)))
        assert pool.num_waiting == pool.num_running == 0
        for name in "abc":
            await request(pool, name)
        await asyncio.sleep(60)
        assert len(world.loaded) == len(set(world.loaded)) <= 2
        assert sorted(world.loaded) == sorted(m.name for m in pool.models if m.state is not State.UNLOADED)

    run(clock, pool, work())
    assert world.loaded == []


def test_a_load_that_takes_longer_than_requests_wait_is_of_use_to_later_ones() -> None:
    """mostlygeek/llama-swap#92: the model counted as failed from then on."""
    clock = Clock()
    pool, world = pool_of(clock, 1, load_timeout=15.0, a=Script(load_s=40.0))

    async def work() -> None:
        for _ in range(2):
            with pytest.raises(ApiError, match="not loaded within 15 s"):
                await request(pool, "a")
        await request(pool, "a")

    run(clock, pool, work())
    assert world.history == ["a"]


@pytest.mark.parametrize("moment", [0.0, LOAD_S / 2, LOAD_S - 0.01, LOAD_S, LOAD_S + 0.01])
def test_an_unload_by_request_meets_a_load(moment: float) -> None:
    """ggml-org/llama.cpp#25528: a process that loads did not hear that it was to end."""
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(load_s=LOAD_S, look_s=0.0), b=Script(look_s=0.0))

    async def work() -> None:
        waiting = asyncio.create_task(request(pool, "a"))
        await asyncio.sleep(moment + 0.001)
        pool.unload(pool.find("a"))
        await asyncio.wait((waiting,))
        assert await request(pool, "b") < 2 * LOAD_S
        assert await request(pool, "a") < 30

    run(clock, pool, work())


@pytest.mark.parametrize("by_request", [True, False])
def test_a_load_takes_longer_than_an_idle_model_stays(by_request: bool) -> None:
    """mostlygeek/llama-swap#289: the load was interrupted when that time was over, and began again."""
    clock = Clock()
    pool, world = pool_of(clock, 1, idle_limit=3.0, a=Script(load_s=40.0))

    async def work() -> None:
        if by_request:
            await pool.load(pool.find("a"))
            await asyncio.sleep(42)
            assert world.loaded == ["a"]
        else:
            await request(pool, "a")
        await asyncio.sleep(6)
        assert world.loaded == []

    run(clock, pool, work())
    assert world.history == ["a"]


@pytest.mark.parametrize("leaves", [0, 1])
@pytest.mark.parametrize("moment", [0.0, LOAD_S / 2, LOAD_S])
def test_one_of_two_clients_leaves_while_their_model_is_loaded(leaves: int, moment: float) -> None:
    """ollama/ollama#8398: the load ended for the other one, too."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(load_s=LOAD_S), b=Script())

    async def work() -> None:
        clients = [asyncio.create_task(request(pool, "a")) for _ in range(2)]
        await asyncio.sleep(moment)
        clients[leaves].cancel()
        await clients[1 - leaves]
        assert pool.num_waiting == pool.num_running == 0

    run(clock, pool, work())
    assert world.history == ["a"]


def test_all_pinned_models_are_loaded_at_the_start_and_the_others_share_the_rest() -> None:
    """mostlygeek/llama-swap#402: only some were loaded. roboflow/inference#2091: idle for the longest time,
    they were looked at first for room, and none behind them."""
    clock = Clock()
    pinned = ("a", "b", "c", "d")
    a, b, c, d, e, f = (Script() for _ in range(6))
    pool, world = pool_of(clock, 5, pinned, a=a, b=b, c=c, d=d, e=e, f=f)

    async def work() -> None:
        await pool.measure_all()
        await asyncio.sleep(60)
        assert sorted(world.loaded) == [*pinned]
        for name in "efef":
            await request(pool, name)
            await asyncio.sleep(60)
        assert sorted(world.loaded) == [*pinned, "f"]

    run(clock, pool, work())
    assert len(world.history) == len(pinned) + 4
