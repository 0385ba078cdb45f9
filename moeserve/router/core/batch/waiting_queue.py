"""The waiting queue: requests, new or preempted, without request slots or KV slots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from moeserve.router.core.request import Request


class SortedRequests:
    """A list of requests sorted by a constant key, smallest first.

    A sorted list instead of a heap, because a heap would keep the prompt of an aborted request until it reached the
    top. Adding and removing move at most max_num_queued_reqs pointers, which takes about a microsecond.
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
        """Removes a request. Raises ValueError if the request is not in the list."""
        at = bisect_left(self._requests, self._key(request), key=self._key)
        if at == len(self._requests) or self._requests[at] is not request:
            raise ValueError(f"request {request.id} is not waiting")
        del self._requests[at]


def by_size(request: Request) -> tuple[int, int, tuple[float, int]]:
    """Sort key: priority, then tokens to compute, then age. See `prompt_order.py`."""
    return (request.priority, request.size, request.age)


by_age = attrgetter("age")


class TenantQueue:
    """One tenant's waiting requests, sorted in the two orders of `prompt_order.py`."""

    __slots__ = ("by_age", "by_size", "num_background")

    def __init__(self) -> None:
        self.by_size = SortedRequests(by_size)
        self.by_age = SortedRequests(by_age)
        self.num_background = 0

    @property
    def is_background(self) -> bool:
        """True if no request of another kind waits."""
        return self.num_background == len(self.by_age)


class WaitingQueue:
    """The waiting requests of all tenants."""

    def __init__(self) -> None:
        self._queues: dict[str, TenantQueue] = {}  # only tenants with waiting requests
        # Tokens to compute before each request's next token, summed up, without background requests.
        self.num_tokens = 0
        self.num_background = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def tenants(self) -> dict[str, TenantQueue]:
        """The queues of the tenants with waiting requests, by name. Read-only."""
        return self._queues

    @property
    def num_others(self) -> int:
        """Number of waiting requests other than background requests."""
        return self._len - self.num_background

    def of_tenant(self, tenant: str) -> int:
        """Returns the number of waiting requests of `tenant`, without background requests."""
        queue = self._queues.get(tenant)
        return 0 if queue is None else len(queue.by_age) - queue.num_background

    def add(self, request: Request, size: int) -> None:
        """Queues a request; `size` is the number of tokens to compute before its next token."""
        request.size = size
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = TenantQueue()
        queue.by_size.add(request)
        queue.by_age.add(request)
        self._len += 1
        queue.num_background += request.is_background
        self.num_background += request.is_background
        self.num_tokens += 0 if request.is_background else size

    def remove(self, request: Request) -> None:
        """Removes a request. Raises ValueError if the request is not waiting."""
        queue = self._queues.get(request.tenant)
        if queue is None:
            raise ValueError(f"request {request.id} is not waiting")
        queue.by_size.remove(request)
        queue.by_age.remove(request)
        if not len(queue.by_age):
            del self._queues[request.tenant]
        self._len -= 1
        queue.num_background -= request.is_background
        self.num_background -= request.is_background
        self.num_tokens -= 0 if request.is_background else request.size
