"""Which request crashes the worker, where one does: it must end, or no other would ever finish.

Every request with a row in flight at a crash is suspected of it until its next token. After a worker that ended by
itself, the suspects are bound one at a time, beside those that are cleared; so the next crash shows which one it is.

Workers may also be killed from outside, at any moment and more than once. That is no request's fault, so requests go on
together at first, and it takes more kills until one is blamed.
"""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.router.core.request import Request, State

MOST_CRASHES = 2  # with a request in flight and no token of it in between, before it is blamed
MOST_KILLS = 5  # the same of workers that were ended from outside


class CrashBlame:
    """The only writer of a request's `crashes`, `crashed_at` and `to_be_tried`."""

    def __init__(self) -> None:
        self._suspects: list[Request] = []

    def lost(self, in_flight: Iterable[Request]) -> None:
        """The worker was lost with rows of these in flight."""
        self._suspects = [request for request in in_flight if request.state is not State.FINISHED]
        for request in self._suspects:
            request.crashes = request.crashes + 1 if request.is_suspect else 1
            request.crashed_at = request.num_output

    def verdict(self, *, by_itself: bool) -> list[Request]:
        """Called when there is another worker: the requests that must not run again. `by_itself`: the lost worker was
        not ended from outside."""
        repeated = [r for r in self._suspects if r.crashes > 1 and r.state is not State.FINISHED]
        for request in self._suspects if by_itself else repeated:
            request.to_be_tried = True
        is_clear = len(repeated) == 1 and repeated[0].crashes >= (MOST_CRASHES if by_itself else MOST_KILLS)
        return repeated if is_clear else []
