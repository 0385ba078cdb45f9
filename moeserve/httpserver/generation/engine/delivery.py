"""Delivery: the queue of answers to one HTTP request. The engine client puts items in, a stream takes them out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moeserve.httpserver.generation.engine.prompt_scores import PromptScores
from moeserve.httpserver.observability.request_record import RequestRecord
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.schema import GenerateRequest, TextItem

Delivered = tuple[int, TextItem]  # the index of a request, and an item of its answer


class Delivery:
    """The queue between the engine and one client's socket. `record` is told the results of the generations."""

    def __init__(self, requests: Sequence[GenerateRequest], record: RequestRecord) -> None:
        self.record = record
        self._queue: asyncio.Queue[Delivered | ApiError] = asyncio.Queue()
        self._scores = PromptScores(requests)

    def put(self, index: int, item: TextItem) -> None:
        for one in self._scores.given_out(index, item):
            self._queue.put_nowait(one)

    def fail(self, error: ApiError) -> None:
        """Makes the whole request fail with `error`."""
        self._queue.put_nowait(error)

    async def take(self) -> Delivered:
        """Waits for the next item. Raises ApiError if the request ends with an error."""
        message = await self._queue.get()
        if isinstance(message, ApiError):
            raise message
        return message
