"""Which GPUs models get, and that their memory is counted GPU by GPU. In virtual time, without GPUs."""

from __future__ import annotations

import asyncio

import pytest

from moeserve.cli.plan.model_needs import gpu_choices
from moeserve.errors import ConfigError
from moeserve.front.gpus import GpuUse, choose_gpus, on_gpus, visible_gpus
from moeserve.front.memory import Memory
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import UNIT, Script, pool_of
from tests.support.router.virtual_time import Clock


def test_memory_is_compared_by_gpu() -> None:
    a = on_gpus(1, (5, 6), (0, 2))
    assert a == Memory(1, (5, 0, 6))
    room = Memory(10, (8, 8, 8))
    assert a.fits(room)
    left = room.minus(a)
    assert left == Memory(9, (3, 8, 2))
    assert not a.fits(left)
    assert on_gpus(1, (8,), (1,)).fits(left)
    assert Memory(1).fits(Memory(1, (-1,))), "a model without GPUs needs none"
    assert not on_gpus(1, (1,), (3,)).fits(room), "there is no such GPU"
    assert Memory(1).plus(a).minus(a) == Memory(1, (0, 0, 0)), "given back whole"
    assert "GPU 2" in a.text()


def test_free_gpus_come_first_then_idle_ones() -> None:
    idle = GpuUse(on_gpus(1, (9,), (0,)), is_loaded=True, is_busy=False)
    busy = GpuUse(on_gpus(1, (5,), (1,)), is_loaded=True, is_busy=True)
    planned = GpuUse(on_gpus(1, (9,), (2,)), is_loaded=False, is_busy=False)
    every = (0, 1, 2, 3)
    assert choose_gpus(1, every, [idle, busy, planned]) == (3,)
    assert choose_gpus(2, every, [idle, busy, planned]) == (2, 3)
    assert choose_gpus(3, every, [idle, busy, planned]) == (0, 2, 3)
    assert choose_gpus(1, (0, 1), [idle, busy]) == (0,), "and not the one whose model is busy"
    assert choose_gpus(2, (1, 0), []) == (1, 0), "those that are named, in their order"
    assert choose_gpus(0, (), [busy]) == ()


def test_gpus_asks_for_a_number_or_for_certain_ones() -> None:
    sizes = [80 * UNIT, 79 * UNIT, 8 * UNIT, 80 * UNIT]
    assert gpu_choices("1", sizes) == (1, [0, 1, 3]), "a small GPU is not chosen in place of a large one"
    assert gpu_choices("2", sizes) == (2, [0, 1, 3])
    assert gpu_choices("4", sizes) == (4, [0, 1, 2, 3])
    assert gpu_choices("3,0", sizes) == (2, [3, 0])
    with pytest.raises(ConfigError, match="4 GPUs"):
        gpu_choices("0,4", sizes)


def test_a_server_sees_its_gpus_only() -> None:
    assert visible_gpus({}, (1, 3)) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4,GPU-7"}, (1,)) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5"}, ()) == {}, "it runs on the CPU"


def test_models_share_gpus_without_a_swap_where_there_are_enough() -> None:
    """Each of three models takes a GPU whole; d takes both of two, and makes the others go."""
    clock = Clock()
    one, both = Script(gpus=1), Script(gpus=2)
    pool, world = pool_of(clock, 100, num_gpus=2, a=one, b=one, c=one, d=both)

    async def work() -> None:
        await asyncio.gather(*(request(pool, name) for name in "ab"))
        assert {pool.find(name).gpus for name in "ab"} == {(0,), (1,)}
        assert world.loaded == ["a", "b"]
        longer = asyncio.create_task(request(pool, "a", 30.0))
        await asyncio.sleep(10)
        await request(pool, "c")  # b is idle, a is busy
        assert sorted(world.loaded) == ["a", "c"]
        assert pool.find("c").gpus == pool.find("b").gpus
        await longer
        await request(pool, "d")
        assert world.loaded == ["d"]
        assert pool.find("d").gpus == (0, 1)
        pool.unload(pool.find("d"))
        await asyncio.sleep(1)
        assert pool.memory_used().gpus == ()
        await asyncio.gather(*(request(pool, name) for name in "bc"))

    run(clock, pool, work())
    assert world.history == ["a", "b", "c", "d", "b", "c"]


def test_more_than_there_is_is_refused() -> None:
    clock = Clock()
    pool, world = pool_of(
        clock, 100, ("a",), num_gpus=2, a=Script(gpus=1), b=Script(gpus=2), c=Script(gpus=1)
    )

    async def work() -> ApiError:
        await pool.measure_all()
        await request(pool, "a")
        with pytest.raises(ApiError) as refused:
            await request(pool, "b")
        await request(pool, "c")
        return refused.value

    error = run(clock, pool, work())
    assert (error.status, error.code) == (400, "model_too_large")
    assert "beside the pinned models" in error.message
    assert world.loaded == []
