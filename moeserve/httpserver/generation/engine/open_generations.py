"""OpenGenerations: the generations that have not ended yet."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from moeserve.httpserver.generation.engine.delivery import Delivery
from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import GenerateRequest, Resumed, TextItem, Usage

MAX_CONSTRAINT_BYTES: Final = 256 << 20  # of the grammars of all open generations


@dataclass(slots=True)
class RunningGeneration:
    """One running choice of one prompt: its request, and its tokens so far. A new router or detokenizer continues the
    choice from these tokens."""

    index: int
    delivery: Delivery
    request: GenerateRequest
    output: array[int] = field(default_factory=lambda: array("i"))  # tokens received
    num_scored: int = 0  # prompt positions whose logprobs were received
    cached_tokens: int | None = None
    first_token_at: float | None = None  # time.monotonic() at the first and the last token
    last_token_at: float | None = None
    crashed_at: int = -1  # len(output) at the last crash that this generation may have caused; -1: none

    @property
    def has_begun(self) -> bool:
        return bool(self.output) or self.num_scored > 0

    def received(self, item: TextItem, now: float) -> None:
        if item.prompt_logprobs is not None:
            self.num_scored += len(item.prompt_logprobs)
        if item.token_ids:
            if self.first_token_at is None:
                self.first_token_at, self.cached_tokens = now, item.cached_tokens
            self.last_token_at = now
            self.output.extend(item.token_ids)

    def usage_so_far(self) -> Usage:
        """Returns the usage of a generation that is cut short. Times and cached tokens are 0, because they come with
        the final message."""
        return Usage(len(self.request.token_ids) // 4, len(self.output), 0, 0.0, 0.0, 0.0)


class OpenGenerations:
    """The running generations by their requests' ids. Only `EngineClient` changes it."""

    def __init__(self, room: QueueRoom) -> None:
        """`room` is told of generations that join and leave."""
        self._room = room
        self._running: dict[int, RunningGeneration] = {}
        self._ids: dict[Delivery, set[int]] = {}  # ids of open requests; no set is empty
        # Bytes of the open generations' grammars. They are bounded because each grammar takes space in the worker's
        # cache.
        self._constraint_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running

    def __iter__(self) -> Iterator[RunningGeneration]:
        return iter(self._running.values())

    def get(self, request_id: int) -> RunningGeneration | None:
        return self._running.get(request_id)

    @property
    def deliveries(self) -> list[Delivery]:
        """Returns the deliveries with open generations."""
        return list(self._ids)

    def ids_of(self, delivery: Delivery) -> list[int]:
        """Returns the ids of an HTTP request's open requests, in the order in which they were sent."""
        return sorted(self._ids.get(delivery, ()))

    def requests_of(self, delivery: Delivery) -> list[GenerateRequest]:
        return [self._running[request_id].request for request_id in self.ids_of(delivery)]

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def add(self, delivery: Delivery, requests: Sequence[GenerateRequest]) -> None:
        """Adds all requests of one HTTP request. Raises ApiError 503 if their grammars take too much memory."""
        size = sum(len(request.sampling.grammar) for request in requests)
        if size and self._constraint_bytes + size > MAX_CONSTRAINT_BYTES:
            message = "the grammars of the requests under way take too much memory"
            raise ApiError(503, message, code="overloaded", refusal=Refusal.MEMORY)
        for index, request in enumerate(requests):
            self._insert(RunningGeneration(index, delivery, request))
            self._room.joined(request)
        self._idle.clear()

    def close(self, request_id: int) -> RunningGeneration | None:
        """Removes and returns a generation; None if it is not open."""
        generation = self._remove(request_id)
        if generation is not None:
            self._room.left(generation.request)
        if not self._running:
            self._idle.set()
        return generation

    def resumed(self, request_id: int, new_id: int) -> GenerateRequest | None:
        """Gives an open generation the id `new_id`, so that late messages for the old id are ignored. Returns the
        request that continues the generation after its output so far; None if it is no longer open."""
        generation = self._remove(request_id)
        if generation is None:
            return None
        so_far = Resumed(
            generation.output.tobytes(),
            generation.num_scored,
            generation.cached_tokens,
            generation.first_token_at,
        )
        generation.request = msgspec.structs.replace(generation.request, id=new_id, resumed=so_far)
        self._insert(generation)
        return generation.request

    def _insert(self, generation: RunningGeneration) -> None:
        request = generation.request
        self._running[request.id] = generation
        self._ids.setdefault(generation.delivery, set()).add(request.id)
        self._constraint_bytes += len(request.sampling.grammar)

    def _remove(self, request_id: int) -> RunningGeneration | None:
        generation = self._running.pop(request_id, None)
        if generation is None:
            return None
        self._constraint_bytes -= len(generation.request.sampling.grammar)
        ids = self._ids[generation.delivery]
        ids.remove(request_id)
        if not ids:
            del self._ids[generation.delivery]
        return generation
