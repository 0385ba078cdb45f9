"""Finds the request that crashes the worker, if one does, so that it can be ended; otherwise no other request would
ever finish.

Every request with a row in flight at a crash is a suspect until its next token. After a worker crashed by itself,
the suspects are bound one at a time beside the cleared requests, so that the next crash identifies the culprit.

Workers may also be killed from outside, at any time and repeatedly, through no fault of a request. So after a kill
requests continue together at first, and more kills are needed before one is blamed.
"""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.router.core.request import Request, State

MOST_CRASHES = 2  # crashes with the request in flight and no token in between, after which it is blamed
MOST_KILLS = 5  # the same for workers that were killed from outside


class CrashBlame:
    """Finds the request that crashes workers. The only writer of a request's `crashes`, `crashed_at` and
    `to_be_tried`."""

    def __init__(self) -> None:
        self._suspects: list[Request] = []

    def lost(self, in_flight: Iterable[Request]) -> None:
        """Notes that the worker was lost with rows of these requests in flight."""
        self._suspects = [request for request in in_flight if request.state is not State.FINISHED]
        for request in self._suspects:
            request.crashes = request.crashes + 1 if request.is_suspect else 1
            request.crashed_at = request.num_output

    def verdict(self, *, by_itself: bool) -> list[Request]:
        """Returns the requests that must not run again. Call it when a new worker is ready. by_itself: the lost
        worker crashed, and was not killed from outside."""
        repeated = [r for r in self._suspects if r.crashes > 1 and r.state is not State.FINISHED]
        for request in self._suspects if by_itself else repeated:
            request.to_be_tried = True
        is_clear = len(repeated) == 1 and repeated[0].crashes >= (MOST_CRASHES if by_itself else MOST_KILLS)
        return repeated if is_clear else []
