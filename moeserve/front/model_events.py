"""llama-server's `GET /models/sse`: changes of the models' states as events, for lists of models that show loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.probes import pool_of
from moeserve.front.schedule import State
from moeserve.httpserver.transport.sse import EventStream

router = APIRouter(tags=["Status"])

LOOK_S: Final = 0.25  # between two looks at the models
EVENT: Final = "status_change"

# llama-server's names of states. A model that is being stopped counts as loaded until its processes have ended.
LLAMA_STATES: Final = {
    State.UNLOADED: "unloaded",
    State.LOADING: "loading",
    State.LOADED: "loaded",
    State.CLOSING: "loaded",
    State.STOPPING: "loaded",
}


@router.get("/models/sse")
async def stream_model_events(request: Request) -> Response:
    """Changes of the models' states from now on, with the progress of loads. Ends when the server does."""
    return EventStream(model_events(pool_of(request)), end=b"")


async def model_events(pool: ModelPool) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yields an event for each change of a model's state or progress."""
    told = {model.name: _status_of(model) for model in pool.listed}
    while not pool.is_ending:
        await asyncio.sleep(LOOK_S)
        for model in pool.listed:
            status = _status_of(model)
            if told.get(model.name) != status:
                told[model.name] = status
                yield {"model": model.name, "event": EVENT, "data": status}


def _status_of(model: PooledModel) -> dict[str, Any]:
    status: dict[str, Any] = {"status": LLAMA_STATES[model.state]}
    if model.failure and model.state is State.UNLOADED:
        status |= {"failed": True, "reason": model.failure}
    if model.state is State.LOADING:
        progress = {"stages": ["text_model"], "current": "text_model", "value": model.fraction}
        status["progress"] = progress
    return status
