"""The server's time limit for a request, from its arrival to its complete answer: `--request-timeout`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moeserve.httpserver.transport.errors import ApiError


@asynccontextmanager
async def request_deadline(arrival: float, limit: float | None) -> AsyncIterator[None]:
    """Bounds the time of the `async with` block. arrival: time of the request's arrival (`time.monotonic()`). limit:
    seconds from the arrival to the block's end; None: no limit. Raises ApiError 504 if the block takes longer."""
    left = None if limit is None else max(arrival + limit - time.monotonic(), 0.0)
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError as error:
        message = f"the answer was not whole after {limit:g} s, the server's limit"
        raise ApiError(504, message, code="request_timeout") from error
