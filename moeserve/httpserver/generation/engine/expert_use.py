"""Expert usage counts, fetched from the engine on demand, at a bounded rate."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.async_channels import AsyncPushChannel
from moeserve.messages.channels import ChannelFull
from moeserve.messages.schema import ExpertUseRequest
from moeserve.messages.steps import ExpertUse

FRESH_S: Final = 0.5  # the worker is asked at most twice a second; an answer costs it under 0.1 ms
TIMEOUT_S: Final = 30.0  # the worker answers between two steps, and a step of a long prompt may take seconds


class ExpertUseFeed:
    """Asks the router for ExpertUse, once for all requests that wait at the same time. `EngineClient` calls `received`
    and `failed`, the routes call `latest`; all on one event loop."""

    def __init__(self, to_router: AsyncPushChannel) -> None:
        self._to_router = to_router
        self._latest: ExpertUse | None = None
        self._received_at = 0.0
        self._asked_at = 0.0
        self._waiting: asyncio.Future[ExpertUse] | None = None

    def received(self, use: ExpertUse) -> None:
        self._latest = use
        self._received_at = time.monotonic()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(use)
        self._waiting = None

    def failed(self, error: ApiError) -> None:
        """Fails the waiting calls, because the engine is lost."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self._waiting = None

    async def latest(self) -> ExpertUse:
        """Returns counts that are at most FRESH_S old. Raises ApiError 503 when the engine does not answer."""
        if self._latest is not None and time.monotonic() - self._received_at < FRESH_S:
            return self._latest
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        waiting = self._waiting
        try:
            await self._ask()
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.shield(waiting)  # others may wait for it too
        except (TimeoutError, ChannelFull) as error:
            raise ApiError(
                503, "the engine does not answer at the moment; try again in a few seconds", code="overloaded"
            ) from error

    async def _ask(self) -> None:
        """Asks the engine; asks again after FRESH_S in case the answer was lost."""
        now = time.monotonic()
        if now - self._asked_at >= FRESH_S:
            self._asked_at = now
            await self._to_router.send(ExpertUseRequest())
