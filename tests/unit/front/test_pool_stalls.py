"""What must not leave requests waiting: failures before a load, errors of the front itself, and pinned models that are
lost. In virtual time, without processes."""

from __future__ import annotations

import asyncio

import pytest

from moeserve.front.pooled_model import FIRST_BACKOFF_S
from moeserve.front.schedule import State
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import Script, ScriptedInstance, pool_of
from tests.support.router.virtual_time import Clock


def test_a_model_that_waits_behind_one_whose_file_cannot_be_read_is_loaded_then() -> None:
    """It needs room, and does not overtake the other one while that one's needs are unknown."""
    clock = Clock()
    bad = Script(look_s=3.0, file_error="the file is cut short")
    pool, world = pool_of(clock, 1, a=Script(), bad=bad, b=Script())

    async def work() -> float:
        await request(pool, "a")
        await asyncio.sleep(10)
        await request(pool, "b")
        await asyncio.sleep(10)
        refused = asyncio.create_task(request(pool, "bad"))
        await asyncio.sleep(0.1)
        began = clock.now
        await request(pool, "a")
        with pytest.raises(ApiError, match="cut short"):
            await refused
        return clock.now - began

    assert run(clock, pool, work()) < 10
    assert world.history == ["a", "b", "a"]


def test_models_that_wait_for_room_get_it_if_a_start_fails() -> None:
    clock = Clock()
    bad = Script(need=2, start_error="Cannot allocate memory")
    pool, world = pool_of(clock, 2, bad=bad, a=Script(), b=Script())

    async def work() -> float:
        await request(pool, "a")
        await request(pool, "b")
        await asyncio.sleep(10)
        refused = asyncio.create_task(request(pool, "bad"))
        await asyncio.sleep(0.05)  # room is made for it, and these wait behind it
        began = clock.now
        waiting = [asyncio.create_task(request(pool, name)) for name in "ab"]
        with pytest.raises(ApiError, match="Cannot allocate memory"):
            await refused
        await asyncio.gather(*waiting)
        return clock.now - began

    assert run(clock, pool, work()) < 10
    assert sorted(world.history) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("where", ["look", "start", "load"])
def test_an_error_of_the_front_itself_is_a_failed_load(where: str) -> None:
    clock = Clock()
    bad = Script(bug=where)
    pool, world = pool_of(clock, 2, a=Script(), bad=bad)

    async def work() -> ApiError:
        await request(pool, "a")
        began = clock.now
        with pytest.raises(ApiError) as refused:
            await request(pool, "bad")
        assert clock.now - began < 1, "it waited for nothing"
        await asyncio.sleep(0.5)
        assert pool.find("bad").state is State.UNLOADED
        assert "a" in world.loaded
        bad.bug = ""
        await asyncio.sleep(FIRST_BACKOFF_S)
        await request(pool, "bad")
        return refused.value

    error = run(clock, pool, work())
    assert (error.status, error.code) == (503, "model_load_failed")
    assert f"a bug in the {where}" in error.message


def test_a_pinned_model_that_is_lost_is_loaded_again_without_a_request() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, ("a",), a=Script(), b=Script())

    async def work() -> None:
        await pool.measure_all()
        await asyncio.sleep(60)
        for name in "ab":
            await request(pool, name)
            instance = pool.find(name).instance
            assert isinstance(instance, ScriptedInstance)
            instance.die("signal 9, Killed")
            await asyncio.sleep(60)
        assert pool.find("a").state is State.LOADED
        assert pool.find("b").state is State.UNLOADED
        pool.unload(pool.find("a"))  # on wish it stays away
        await asyncio.sleep(60)
        assert pool.find("a").state is State.UNLOADED

    run(clock, pool, work())
    assert world.history == ["a", "a", "b"]
