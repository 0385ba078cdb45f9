"""The pool of models: who is loaded, who makes room, who waits how long. In virtual time, without processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from moeserve.front.lives import FIRST_BACKOFF_S
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.schedule import MIN_TURN_S, State
from moeserve.httpserver.transport.errors import ApiError
from tests.support.scripted_models import Script, ScriptedInstance, pool_of
from tests.support.virtual_time import Clock


async def request(pool: ModelPool, name: str, seconds: float = 0.5) -> float:
    """Returns how long it waited for its model."""
    came = pool.now
    async with pool.lease(pool.find(name)):
        waited = pool.now - came
        await asyncio.sleep(seconds)
    return waited


def state_of(model: PooledModel) -> State:
    return model.state


def run(clock: Clock, pool: ModelPool, work: Coroutine[Any, Any, Any]) -> Any:
    async def all_of_it() -> Any:
        try:
            return await work
        finally:
            await pool.close()

    return clock.run(all_of_it())


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


def test_a_load_that_fails_says_why_and_is_tried_again_later() -> None:
    clock = Clock()
    bad = Script(failure="the tensor blk.3.ffn is cut short")
    pool, world = pool_of(clock, 2, a=Script(), b=bad)

    async def work() -> list[tuple[float, ApiError]]:
        await request(pool, "a")
        found = []
        for _ in range(3):
            with pytest.raises(ApiError) as refused:
                await request(pool, "b")
            found.append((clock.now, refused.value))
            assert "a" in world.loaded
        await asyncio.sleep(FIRST_BACKOFF_S)
        with pytest.raises(ApiError):
            await request(pool, "b")
        bad.failure = ""
        await asyncio.sleep(FIRST_BACKOFF_S + 1)
        with pytest.raises(ApiError):
            await request(pool, "b")  # the second failure in a row counts longer
        await asyncio.sleep(FIRST_BACKOFF_S)
        await request(pool, "b")
        return found

    found = run(clock, pool, work())
    assert {error.status for _, error in found} == {503}
    assert all("cut short" in error.message for _, error in found)
    assert found[0][0] == found[2][0], "until the next try all are refused at once"
    assert found[0][1].headers()["retry-after"] == "5"
    assert world.history == ["a", "b", "b", "b"]


def test_a_file_that_vanishes_and_comes_back() -> None:
    clock = Clock()
    script = Script()
    pool, world = pool_of(clock, 1, a=script, b=Script())

    async def work() -> ApiError:
        await request(pool, "a")
        script.version, script.file_error = 1, "there is no /models/a.gguf"
        await request(pool, "a")  # it is loaded, and needs its file no more
        await request(pool, "b")
        with pytest.raises(ApiError) as refused:
            await request(pool, "a")
        await request(pool, "b")
        script.version, script.file_error = 2, ""
        await request(pool, "a")  # at once: the file is another one
        return refused.value

    error = run(clock, pool, work())
    assert error.status == 503
    assert "there is no /models/a.gguf" in error.message
    assert world.history == ["a", "b", "a"]


def test_a_server_that_is_lost_is_started_again_and_others_are_not_touched() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(), b=Script())

    async def work() -> None:
        await request(pool, "a")
        await request(pool, "b")
        await asyncio.sleep(40)
        instance = pool.find("a").instance
        assert isinstance(instance, ScriptedInstance)
        instance.die("signal 9, Killed")
        await asyncio.sleep(0.5)
        assert world.loaded == ["b"]
        await request(pool, "a")

    run(clock, pool, work())
    assert world.history == ["a", "b", "a"]
    assert pool.find("a").num_losses == 1


def test_a_server_that_dies_at_once_again_and_again_is_not_started_without_end() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script())

    async def work() -> ApiError:
        await request(pool, "a")
        instance = pool.find("a").instance
        assert isinstance(instance, ScriptedInstance)
        instance.die("signal 11, Segmentation fault")
        await asyncio.sleep(0.5)
        with pytest.raises(ApiError) as refused:
            await request(pool, "a")
        return refused.value

    error = run(clock, pool, work())
    assert "Segmentation fault" in error.message
    assert world.history == ["a"]


def test_a_wait_has_an_end() -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(load_s=100.0), load_timeout=10.0)

    async def work() -> ApiError:
        with pytest.raises(ApiError) as refused:
            await request(pool, "a")
        assert clock.now == pytest.approx(10.0)
        return refused.value

    error = run(clock, pool, work())
    assert (error.status, error.code) == (503, "model_loading")
    assert "loading: weights 0%" in error.message
    assert "retry-after" in error.headers()


def test_waiting_requests_are_bounded() -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(), max_waiting=2)

    async def work() -> list[Any]:
        return await asyncio.gather(*(request(pool, "a") for _ in range(4)), return_exceptions=True)

    found = run(clock, pool, work())
    refused = [one for one in found if isinstance(one, ApiError)]
    assert len(refused) == 2
    assert {error.code for error in refused} == {"overloaded"}


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


def test_load_and_unload_by_request() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 2, a=Script(load_s=10.0), b=Script())
    model = pool.find("a")

    async def work() -> None:
        with pytest.raises(ApiError) as refused:
            pool.unload(model)
        assert refused.value.status == 400
        pool.load(model)
        await asyncio.sleep(5)
        assert state_of(model) is State.LOADING
        pool.unload(model)  # the load ends
        await asyncio.sleep(1)
        assert state_of(model) is State.UNLOADED
        pool.load(model)
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


def test_a_drain_lets_running_answers_end_and_refuses_others() -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 1, a=Script(), b=Script())

    async def work() -> list[Any]:
        running = asyncio.create_task(request(pool, "a", 10.0))
        await asyncio.sleep(3)
        waiting = asyncio.create_task(request(pool, "b"))
        await asyncio.sleep(1)
        await pool.drain(30.0)
        with pytest.raises(ApiError) as refused:
            await request(pool, "a")
        assert refused.value.code == "shutting_down"
        return list(await asyncio.gather(running, waiting, return_exceptions=True))

    ran, waited = run(clock, pool, work())
    assert isinstance(ran, float)
    assert isinstance(waited, ApiError)
    assert waited.code == "shutting_down"
    assert clock.now < 15


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    pool, _ = pool_of(Clock(), 1, a=Script(), b=Script())
    with pytest.raises(ApiError) as refused:
        pool.find("gpt-4")
    assert refused.value.status == 404
    assert "served are 'a', 'b'" in refused.value.message
    assert pool.find(None).name == "a"
