"""The waiting queue: requests that hold no request slot and no KV slots, new or preempted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from moeserve.router.core.request import Request


class SortedRequests:
    """Requests by a key that does not change while they are in it, smallest first.

    A sorted list rather than a heap: removing an aborted request leaves nothing behind, whereas a heap would keep its
    prompt until it reaches the top. Adding and removing move at most max_num_queued_reqs pointers: a microsecond or so.
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
    """Sort key: priority, then tokens to compute, then age. See `prompt_order.py`."""
    return (request.priority, request.size, request.age)


by_age = attrgetter("age")


class TenantQueue:
    """One tenant's waiting requests in both orders of `prompt_order.py`."""

    __slots__ = ("by_age", "by_size")

    def __init__(self) -> None:
        self.by_size = SortedRequests(by_size)
        self.by_age = SortedRequests(by_age)


class WaitingQueue:
    """The waiting requests of all tenants."""

    def __init__(self) -> None:
        self._queues: dict[str, TenantQueue] = {}  # tenants that have waiting requests
        self.num_tokens = 0  # to compute before the next tokens of all requests
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def tenants(self) -> dict[str, TenantQueue]:
        """The queues of the tenants that have waiting requests, by name. Not to be changed by the caller."""
        return self._queues

    def of_tenant(self, tenant: str) -> int:
        """The number of requests of `tenant` that wait."""
        return len(self._queues[tenant].by_age) if tenant in self._queues else 0

    def add(self, request: Request, size: int) -> None:
        """Queues a request; `size` is the number of tokens to compute before its next token."""
        request.size = size
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = TenantQueue()
        queue.by_size.add(request)
        queue.by_age.add(request)
        self._len += 1
        self.num_tokens += size

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request is not waiting."""
        queue = self._queues.get(request.tenant)
        if queue is None:
            raise ValueError(f"request {request.id} is not waiting")
        queue.by_size.remove(request)
        queue.by_age.remove(request)
        if not len(queue.by_age):
            del self._queues[request.tenant]
        self._len -= 1
        self.num_tokens -= request.size
