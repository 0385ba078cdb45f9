"""The queue of requests that hold nothing: new ones and paused ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from moeserve.router.core.request import Request


class SortedRequests:
    """Requests by a key that does not change while they are in it, smallest first.

    A sorted list: adding and removing move at most max_num_queued_reqs pointers, a microsecond or so, and an
    aborted request leaves nothing behind (a heap would keep its prompt until it surfaced).
    """

    __slots__ = ("_key", "_requests")

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request is not there."""
        at = bisect_left(self._requests, self._key(request), key=self._key)
        if at == len(self._requests) or self._requests[at] is not request:
            raise ValueError(f"request {request.id} is not waiting")
        del self._requests[at]


def by_size(request: Request) -> tuple[int, int, tuple[float, int]]:
    """The order that serves most people soonest: urgent first, then short. See `prompt_order.py`."""
    return (request.priority, request.size, request.age)


by_age = attrgetter("age")


class Lanes:
    """One tenant's waiting requests in both orders."""

    __slots__ = ("by_age", "by_size")

    def __init__(self) -> None:
        self.by_size = SortedRequests(by_size)
        self.by_age = SortedRequests(by_age)


class WaitingQueue:
    def __init__(self) -> None:
        self._lanes: dict[str, Lanes] = {}  # of the tenants with waiting requests
        self.num_tokens = 0  # known tokens of all of them
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def tenants(self) -> dict[str, Lanes]:
        """To be read only."""
        return self._lanes

    def of_tenant(self, tenant: str) -> int:
        """Requests that wait."""
        return len(self._lanes[tenant].by_age) if tenant in self._lanes else 0

    def add(self, request: Request, size: int) -> None:
        """`size`: tokens to compute before its next one."""
        request.size = size
        lanes = self._lanes.get(request.tenant)
        if lanes is None:
            lanes = self._lanes[request.tenant] = Lanes()
        lanes.by_size.add(request)
        lanes.by_age.add(request)
        self._len += 1
        self.num_tokens += size

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request is not waiting."""
        lanes = self._lanes.get(request.tenant)
        if lanes is None:
            raise ValueError(f"request {request.id} is not waiting")
        lanes.by_size.remove(request)
        lanes.by_age.remove(request)
        if not len(lanes.by_age):
            del self._lanes[request.tenant]
        self._len -= 1
        self.num_tokens -= request.size
