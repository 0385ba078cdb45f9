"""The stream of the models' states. In virtual time, without processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moeserve.front.model_events import model_events
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock


@pytest.mark.parametrize("way", ["drain", "leave"])
def test_changes_are_told_until_the_server_ends(way: str) -> None:
    clock = Clock()
    pool, _ = pool_of(clock, 2, a=Script(), bad=Script(failure="no such tensor"))
    told: list[Any] = []

    async def listen() -> None:
        async for event in model_events(pool):
            told.append(event)

    async def work() -> None:
        listening = asyncio.create_task(listen())
        await asyncio.sleep(1)
        assert not told, "what was before is in the list of models"
        await request(pool, "a")
        with pytest.raises(ApiError):
            await request(pool, "bad")
        pool.unload(pool.find("a"))
        await asyncio.sleep(1)
        if way == "leave":
            pool.leave()  # an upgrade does not wait for such a stream
        else:
            await pool.drain(1.0)
        await asyncio.wait_for(listening, 1)

    run(clock, pool, work())
    of_a = [event["data"] for event in told if event["model"] == "a"]
    assert [data["status"] for data in of_a] == ["loading", "loading", "loaded", "unloaded"]
    assert [data["progress"]["value"] for data in of_a[:2]] == [0.0, 0.5]
    of_bad = [event["data"] for event in told if event["model"] == "bad"]
    assert of_bad[-1] == {"status": "unloaded", "failed": True, "reason": "no such tensor"}
    assert {event["event"] for event in told} == {"status_change"}
