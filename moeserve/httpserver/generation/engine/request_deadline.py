"""The server's limit for a request, waiting and answering together: `--request-timeout`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moeserve.httpserver.transport.errors import ApiError


@asynccontextmanager
async def request_deadline(arrival: float, limit: float | None) -> AsyncIterator[None]:
    """Bounds the `async with` block. arrival: the request's, in `time.monotonic()`'s seconds. limit: seconds from then
    on; None: no limit. Raises ApiError 504 if the block is not done by then."""
    left = None if limit is None else max(arrival + limit - time.monotonic(), 0.0)
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError as error:
        message = f"the answer was not whole after {limit:g} s, the server's limit"
        raise ApiError(504, message, code="request_timeout") from error
