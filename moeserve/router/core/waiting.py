"""The queue of requests that hold nothing yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from moeserve.router.core.request import Request

_by_key = attrgetter("key")


class WaitingQueue:
    """Requests by (priority, arrival, id), smallest first.

    A sorted list: adding and removing move at most max_num_queued_reqs pointers, a microsecond or so, and an
    aborted request leaves nothing behind (a heap would keep its prompt until it surfaced).
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def head(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_by_key)

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request is not queued."""
        at = bisect_left(self._requests, request.key, key=_by_key)
        if at == len(self._requests) or self._requests[at] is not request:
            raise ValueError(f"request {request.id} is not waiting")
        del self._requests[at]
