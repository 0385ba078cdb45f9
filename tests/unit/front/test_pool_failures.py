"""Loads that fail, servers that are lost, and the limits of waiting. In virtual time, without processes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from moeserve.front.lives import MOST_CRASHES, SHORT_LIFE_S
from moeserve.front.pooled_model import FIRST_BACKOFF_S
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import Script, ScriptedInstance, pool_of
from tests.support.router.virtual_time import Clock


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
    """The first crash may be anyone's fault: a request that waits has the model loaded again at once."""
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script())

    async def dies() -> None:
        await request(pool, "a")
        instance = pool.find("a").instance
        assert isinstance(instance, ScriptedInstance)
        instance.die("signal 11, Segmentation fault")
        await asyncio.sleep(0.5)

    async def work() -> list[tuple[float, ApiError]]:
        found = []
        await dies()
        for _ in range(2):
            await dies()
            with pytest.raises(ApiError) as refused:
                await request(pool, "a")
            found.append((pool.find("a").retry_at - pool.now, refused.value))
            await asyncio.sleep(FIRST_BACKOFF_S)
        await asyncio.sleep(FIRST_BACKOFF_S)
        await request(pool, "a", SHORT_LIFE_S)
        await dies()
        await dies()
        return found

    (first, error), (second, _) = run(clock, pool, work())
    assert "Segmentation fault" in error.message
    assert (first, second) == pytest.approx((FIRST_BACKOFF_S - 0.5, 2 * FIRST_BACKOFF_S - 0.5))
    assert world.history == ["a"] * 5


def test_a_server_that_is_killed_from_outside_again_and_again_is_started_each_time() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script())

    async def work() -> None:
        for _ in range(MOST_CRASHES + 2):
            await request(pool, "a")
            instance = pool.find("a").instance
            assert isinstance(instance, ScriptedInstance)
            instance.die("signal 9, Killed", by_itself=False)
            await asyncio.sleep(0.5)
        await request(pool, "a")

    run(clock, pool, work())
    assert world.history == ["a"] * (MOST_CRASHES + 3)
    assert pool.find("a").num_failures == 0


def test_a_server_that_crashes_during_its_load_is_started_again_once() -> None:
    clock = Clock()
    script = Script(failure="signal 11, Segmentation fault", is_crash=True)
    pool, world = pool_of(clock, 1, a=script)

    async def work() -> ApiError:
        waiting = asyncio.create_task(request(pool, "a"))
        await asyncio.sleep(2.05)  # the first load has failed
        script.failure = ""
        await waiting
        await asyncio.sleep(SHORT_LIFE_S)
        pool.unload(pool.find("a"))
        await asyncio.sleep(1)
        script.failure = "signal 11, Segmentation fault"
        with pytest.raises(ApiError) as refused:
            await request(pool, "a")
        return refused.value

    error = run(clock, pool, work())
    assert "ended during its load: signal 11, Segmentation fault" in error.message
    assert world.history == ["a"] * 4


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


def test_a_file_that_is_back_is_not_refused_while_it_is_looked_at() -> None:
    """A download that has ended has its file looked at before a request comes."""
    clock = Clock()
    script = Script(file_error="its file is not there")
    pool, world = pool_of(clock, 1, a=script)

    async def work() -> None:
        with pytest.raises(ApiError):
            await request(pool, "a")
        script.version, script.file_error = 1, ""
        pool.look_at_file(pool.find("a"))
        await asyncio.sleep(0.005)  # half of the look
        await request(pool, "a")

    run(clock, pool, work())
    assert world.history == ["a"]


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_what_was_missing_at_the_start_may_come_where_no_look_sees_it(is_looked_at: bool) -> None:
    """A model of the hub that another program has downloaded; after /api/pull it is looked at without a request."""
    clock = Clock()
    script = Script(file_error="it has not been downloaded")
    pool, world = pool_of(clock, 1, a=script)
    (model,) = pool.models
    model.served = dataclasses.replace(model.served, is_resolved=False)

    async def work() -> None:
        for _ in range(8):
            with pytest.raises(ApiError, match="has not been downloaded"):
                await request(pool, "a")
            await asyncio.sleep(FIRST_BACKOFF_S)
        with pytest.raises(ApiError):
            await request(pool, "a")
        script.file_error = ""
        if is_looked_at:
            pool.look_at_file(model)
            await asyncio.sleep(1)
        else:
            await asyncio.sleep(FIRST_BACKOFF_S)
        await request(pool, "a")

    run(clock, pool, work())
    assert world.history == ["a"]
    assert model.served.is_resolved


def test_a_request_waits_until_its_server_takes_requests_again() -> None:
    """The model's own launcher replaces a part of the server; a server that has ended is waited for no longer."""
    clock = Clock()
    pool, _ = pool_of(clock, 1, load_timeout=60.0, a=Script())
    (model,) = pool.models

    async def work() -> list[float]:
        waited = []
        await request(pool, "a")
        instance = model.instance
        assert isinstance(instance, ScriptedInstance)
        for undo in (lambda: setattr(instance, "is_answering", True), lambda: instance.die("killed")):
            instance.is_answering = False
            assert model.progress_text == "waiting for its server to answer"
            asyncio.get_running_loop().call_later(20.0, undo)
            began = clock.now
            await pool.until_back(model, instance)
            waited.append(clock.now - began)
        await request(pool, "a")
        assert model.instance is not None
        model.instance.is_answering = False
        with pytest.raises(ApiError) as refused:
            await pool.until_back(model, model.instance)
        assert refused.value.status == 503
        return waited

    waited = run(clock, pool, work())
    assert waited == [pytest.approx(20.0, abs=0.2)] * 2
