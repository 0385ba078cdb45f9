"""Runs a pool of scripted models in virtual time, and requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.schedule import State
from tests.support.router.virtual_time import Clock


async def request(pool: ModelPool, name: str, seconds: float = 0.5) -> float:
    """Returns the seconds that the request waited for its model."""
    came = pool.now
    async with pool.lease(pool.find(name)):
        waited = pool.now - came
        await asyncio.sleep(seconds)
    return waited


def state_of(model: PooledModel) -> State:
    return model.state


def run(clock: Clock, pool: ModelPool, work: Coroutine[Any, Any, Any]) -> Any:
    """Runs `work`, then closes the pool."""

    async def all_of_it() -> Any:
        try:
            return await work
        finally:
            await pool.close()

    return clock.run(all_of_it())
