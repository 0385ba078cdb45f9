"""In an upgrade, what the earlier front's models still hold is not used twice, and the rest is used at once."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

from moeserve.front.memory import Held, Memory
from moeserve.front.memory_share import NOTHING, MemoryShare
from moeserve.front.schedule import State
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import UNIT, Script, pool_of
from tests.support.router.virtual_time import Clock

HELD = Held(Memory(3, (1, 2)), frozenset(("/kv/a",)), 10, [5, 6])


def test_a_later_front_waits_until_the_earlier_one_has_told_and_has_all_when_it_ends(tmp_path: Path) -> None:
    first = MemoryShare(tmp_path)
    assert first.held_by_earlier() == NOTHING
    second = MemoryShare(tmp_path)
    assert second.held_by_earlier() is None
    assert first.held_by_earlier() == NOTHING, "it does not wait for a later one"
    first.publish(HELD)
    assert second.held_by_earlier() == HELD
    first.publish(Held(Memory(1)))
    assert second.held_by_earlier() == Held(Memory(1))
    first.close()
    assert second.held_by_earlier() == NOTHING
    second.close()
    third = MemoryShare(tmp_path)
    assert third.held_by_earlier() == NOTHING
    assert len(list(tmp_path.iterdir())) == 1, "files of fronts that have ended are removed"
    third.close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        MemoryShare(tmp_path)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    later = MemoryShare(tmp_path)
    assert later.held_by_earlier() == NOTHING
    later.close()


def test_of_several_earlier_fronts_all_count(tmp_path: Path) -> None:
    first, second, third = (MemoryShare(tmp_path) for _ in range(3))
    first.publish(HELD)
    assert third.held_by_earlier() is None, "the second may still load models"
    second.publish(Held(Memory(4, (1,)), frozenset(("/kv/b",)), 99, [9]))
    assert third.held_by_earlier() == Held(Memory(7, (2, 2)), frozenset(("/kv/a", "/kv/b")), 10, [5, 6])
    first.close()
    assert third.held_by_earlier() == Held(Memory(4, (1,)), frozenset(("/kv/b",)), 99, [9])
    second.close()
    third.close()


def test_half_a_line_counts_as_what_was_read_before(tmp_path: Path) -> None:
    first, second = MemoryShare(tmp_path), MemoryShare(tmp_path)
    (path, _) = sorted(tmp_path.iterdir())
    path.write_bytes(b'{"memory":[3')
    assert second.held_by_earlier() is None
    first.publish(HELD)
    assert second.held_by_earlier() == HELD
    path.write_bytes(b'{"memory":[3')
    assert second.held_by_earlier() == HELD
    first.close()
    second.close()


def test_models_are_loaded_in_what_an_earlier_server_does_not_hold() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 3, a=Script(), b=Script(need=2), c=Script(need=3))
    pool.others_hold(Memory(2 * UNIT), frozenset())

    async def work() -> tuple[float, float]:
        await request(pool, "a")
        second = asyncio.create_task(request(pool, "b"))
        await asyncio.sleep(60)
        assert world.history == ["a"]
        assert not pool.find("b").is_too_large
        pool.others_hold(Memory(UNIT), frozenset())
        waited = await second  # the idle one makes room for it
        third = asyncio.create_task(request(pool, "c"))
        await asyncio.sleep(60)
        pool.others_hold(Memory(0), frozenset())
        return waited, await third

    assert all(60 <= waited < 70 for waited in run(clock, pool, work()))
    assert world.history == ["a", "b", "c"]


def test_a_model_whose_folder_an_earlier_server_uses_waits_and_others_do_not() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 3, a=Script(), b=Script())
    first = pool.find("a")
    config = dataclasses.replace(first.served.config, kv_disk="/kv/a")
    first.served = dataclasses.replace(first.served, config=config)
    pool.others_hold(Memory(UNIT), frozenset(("/kv/a",)))

    async def work() -> None:
        waiting = asyncio.create_task(request(pool, "a"))
        await asyncio.sleep(1)
        await request(pool, "b")
        await asyncio.sleep(60)
        assert world.history == ["b"]
        pool.others_hold(Memory(0), frozenset())
        await waiting

    run(clock, pool, work())
    assert world.history == ["b", "a"]


def test_a_server_that_leaves_tells_what_it_holds_and_what_it_has_still_to_load() -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 2, a=Script(), b=Script(need=2, look_s=5.0))

    async def work() -> list[Held | None]:
        running = asyncio.create_task(request(pool, "a", 60))
        await asyncio.sleep(10)
        waiting = asyncio.create_task(request(pool, "b"))
        pool.leave()
        await asyncio.sleep(1)
        told = [pool.held]
        await asyncio.sleep(10)
        told.append(pool.held)
        await running
        await asyncio.sleep(1)
        told.append(pool.held)
        await waiting
        await asyncio.sleep(1)
        assert all(model.state is State.UNLOADED for model in pool.models)
        told.append(pool.held)
        return told

    unknown, both, loading, none = run(clock, pool, work())
    assert unknown is None, "what b needs is not known yet"
    assert [held.memory.ram // UNIT for held in (both, loading, none)] == [3, 2, 0]
    assert none.ram_budget == 2 * UNIT
