"""Which models are in memory: who makes room, who is pinned, too large or idle. In virtual time, without processes."""

from __future__ import annotations

import asyncio

import pytest

from moeserve.front.schedule import State
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run, state_of
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock


def test_the_longest_idle_makes_room_by_bytes_and_not_by_count() -> None:
    clock = Clock()
    pool, world = pool_of(
        clock, 4, a=Script(need=1), b=Script(need=1), c=Script(need=2), d=Script(need=1), e=Script(need=3)
    )

    async def work() -> list[str]:
        for name in "abc":  # all three fit
            await request(pool, name)
        await request(pool, "a")
        await request(pool, "d")  # b has been idle longest, and is enough
        assert sorted(world.loaded) == ["a", "c", "d"]
        await request(pool, "e")  # c alone is not enough, and with it a is not needed more than d
        return sorted(world.loaded)

    assert run(clock, pool, work()) == ["d", "e"]


def test_a_model_that_is_larger_than_needed_makes_room_alone() -> None:
    """An idle model that is evicted only because it came first in the order, and is not needed, stays."""
    clock = Clock()
    pool, world = pool_of(clock, 4, small=Script(need=1), big=Script(need=3), other=Script(need=3))

    async def work() -> list[str]:
        await request(pool, "small")
        await request(pool, "big")
        await request(pool, "other")
        return sorted(world.loaded)

    assert run(clock, pool, work()) == ["other", "small"]


def test_a_pinned_model_never_makes_room() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, pinned=("a",), a=Script(), b=Script(), c=Script(), d=Script(need=2))

    async def work() -> ApiError:
        await pool.measure_all()
        for name in "bcbc":
            await request(pool, name)
            assert "a" in world.loaded
        with pytest.raises(ApiError) as refused:
            await request(pool, "d")
        return refused.value

    error = run(clock, pool, work())
    assert (error.status, error.code) == (400, "model_too_large")
    assert "2.00 GiB" in error.message
    assert "1.00 GiB" in error.message
    assert "pinned" in error.message
    assert world.history.count("a") == 1


def test_a_model_that_is_too_large_says_the_figures_and_touches_nothing() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(), b=Script(need=5))

    async def work() -> list[ApiError]:
        await request(pool, "a")
        errors = []
        for _ in range(2):
            with pytest.raises(ApiError) as refused:
                await request(pool, "b")
            errors.append(refused.value)
        assert world.loaded == ["a"]
        return errors

    for error in run(clock, pool, work()):
        assert error.status == 400
        assert "needs 5.00 GiB of RAM, and 2.00 GiB of RAM can be had" in error.message


def test_a_containers_limit_is_named_where_a_model_is_too_large() -> None:
    """The answer said to raise a flag that could not give more than the container has."""
    limit = " (a control group limits this process to 2.40 GiB)"
    clock = Clock()
    pool, _ = pool_of(clock, 2, ("p",), num_gpus=1, p=Script(gpus=1), a=Script(need=5), b=Script(gpus=1))
    pool.limit = limit

    async def work() -> list[str]:
        said = []
        await pool.measure_all()
        for name in "ab":
            with pytest.raises(ApiError) as refused:
                await request(pool, name)
            said.append(refused.value.message)
        return said

    message, of_gpu = run(clock, pool, work())
    assert limit not in of_gpu
    assert "beside the pinned models: lower its --max-model-len" in of_gpu
    assert (
        f"1.00 GiB of RAM can be had beside the pinned models{limit}: raise that limit, or lower" in message
    )


def test_an_idle_model_is_unloaded() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, pinned=("b",), idle_limit=60.0, a=Script(), b=Script())

    async def work() -> None:
        await pool.measure_all()
        await request(pool, "a")
        await asyncio.sleep(59)
        assert "a" in world.loaded
        await request(pool, "a", 100.0)
        await asyncio.sleep(59)
        assert "a" in world.loaded
        await asyncio.sleep(2)
        assert world.loaded == ["b"]

    run(clock, pool, work())


def test_keep_alive_of_the_last_request_counts() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, idle_limit=60.0, a=Script())
    model = pool.find("a")

    async def work() -> None:
        pool.keep(model, 0.0)
        one, other = (asyncio.create_task(request(pool, "a", seconds)) for seconds in (5.0, 9.0))
        await one
        await asyncio.sleep(1)
        assert world.loaded == ["a"], "until its last request has ended"
        await other
        await asyncio.sleep(0.2)
        assert world.loaded == []
        pool.keep(model, float("inf"))
        await request(pool, "a")
        await asyncio.sleep(1e6)
        assert world.loaded == ["a"]
        pool.keep(model, None)
        await request(pool, "a")
        await asyncio.sleep(61)
        assert world.loaded == []

    run(clock, pool, work())


def test_keep_alive_counts_until_the_unload() -> None:
    """One request that had the model unloaded at once does not have it loaded again for each later one."""
    clock = Clock()
    pool, world = pool_of(clock, 1, idle_limit=60.0, a=Script())
    model = pool.find("a")

    async def work() -> None:
        async with pool.lease(model):
            pool.keep(model, 0.0)
        await asyncio.sleep(1)
        assert world.loaded == []
        for _ in range(3):
            await request(pool, "a")
            await asyncio.sleep(30)
        assert world.history == ["a", "a"]
        pool.leave()
        await asyncio.sleep(1)
        assert world.loaded == []
        await request(pool, "a")  # another server takes the new ones
        await asyncio.sleep(1)
        assert world.loaded == []

    run(clock, pool, work())


def test_load_and_unload_by_request() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(load_s=10.0), b=Script())
    model = pool.find("a")

    async def work() -> None:
        with pytest.raises(ApiError) as refused:
            pool.unload(model)
        assert refused.value.status == 400
        await pool.load(model)
        await asyncio.sleep(5)
        assert state_of(model) is State.LOADING
        pool.unload(model)  # the load ends
        await asyncio.sleep(1)
        assert state_of(model) is State.UNLOADED
        await pool.load(model)
        await asyncio.sleep(11)
        long = asyncio.create_task(request(pool, "a", 20.0))
        await asyncio.sleep(1)
        pool.unload(model)
        later = asyncio.create_task(request(pool, "a", 1.0))
        await asyncio.sleep(1)
        assert not long.done()
        assert state_of(model) is State.CLOSING
        await long
        await later

    run(clock, pool, work())
    assert world.history == ["a", "a", "a"]


def test_a_question_about_a_model_neither_loads_nor_keeps_it() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, idle_limit=60.0, a=Script())
    model = pool.find("a")

    async def work() -> None:
        with pytest.raises(ApiError) as refused:
            async with pool.lease_loaded(model):
                pass
        assert (refused.value.status, refused.value.code) == (503, "model_not_loaded")
        await request(pool, "a")
        for _ in range(12):
            await asyncio.sleep(5)
            if model.state is State.LOADED:
                async with pool.lease_loaded(model):
                    pass
        await asyncio.sleep(1)
        assert world.loaded == []

    run(clock, pool, work())
    assert world.history == ["a"]


def test_a_model_whose_file_is_looked_at_for_long_is_not_overtaken() -> None:
    """On a busy machine a look takes as long as loads: others do not take turns meanwhile."""
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(), b=Script(), c=Script(look_s=60.0), d=Script())

    async def client(name: str) -> None:
        while clock.now < 200:
            await request(pool, name, 1.0)

    async def work() -> None:
        await request(pool, "a")
        await request(pool, "b")
        await request(pool, "d")
        slow = asyncio.create_task(request(pool, "c"))
        await asyncio.sleep(0.1)
        clients = [asyncio.create_task(client(name)) for name in "abd"]
        await slow
        await asyncio.gather(*clients)

    run(clock, pool, work())
    assert pool.find("c").most_swaps_waited <= 3
    assert len(world.history) > 20, "they do afterwards"
