"""Estimates whether the router's queue has room for a request.

The router decides (`router/core/policy/back_pressure.py`), but only after this process has tokenised the request and
sent each of its choices. A client that keeps sending refused requests would thus occupy the event loop. This process
knows which generations are open and how many of them run; the others wait in the router's queue. So this process makes
most refusals itself, before the work."""

from __future__ import annotations

from collections import Counter

from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import BACKGROUND_PRIORITY, GenerateRequest

RETRY_AFTER_S = 1  # seconds; used until the router has reported how long its queue takes


class QueueRoom:
    """Counts the open generations of each key name. A beam search counts as one; background requests do not count."""

    def __init__(self, most_waiting: int = 1 << 62) -> None:
        """`most_waiting`: --max-num-queued-reqs."""
        self._most = most_waiting
        self._open: Counter[str] = Counter()
        self._retry_after = RETRY_AFTER_S

    @property
    def is_empty(self) -> bool:
        """True if no generation is open."""
        return not self._open

    def joined(self, request: GenerateRequest) -> None:
        if count := _counts(request):
            self._open[request.key_name] += count

    def left(self, request: GenerateRequest) -> None:
        if not (count := _counts(request)):
            return
        self._open[request.key_name] -= count
        if not self._open[request.key_name]:
            del self._open[request.key_name]

    def refused(self, retry_after: int) -> None:
        """Notes that the router has refused a request. retry_after: the router's estimate of the wait in its queue, in
        seconds."""
        self._retry_after = retry_after

    def check(self, key_name: str, wanted: int, running: int) -> None:
        """Raises ApiError 503 if the queue has no room for `wanted` more generations of a key. running: the most
        generations of all keys together that can run at once; these do not count as waiting."""
        waiting = self._open.total() - running
        of_key = self._open[key_name] - running
        if waiting + wanted > self._most:
            self._refuse(f"{waiting} requests are waiting already", Refusal.QUEUE_FULL)
        share = max(self._most // (len(self._open.keys() | {key_name}) + 1), 1) if key_name else self._most
        if of_key + wanted > share:
            self._refuse(f"{of_key} requests of this API key are waiting already", Refusal.QUOTA)

    def _refuse(self, cause: str, refusal: Refusal) -> None:
        wait = self._retry_after
        message = f"the server is busy: {cause}; try again in {wait} s"
        raise ApiError(503, message, code="overloaded", retry_after=wait, refusal=refusal)


def _counts(request: GenerateRequest) -> int:
    if request.priority == BACKGROUND_PRIORITY:
        return 0
    return 1 if request.beams is None or request.beams.choice == 0 else 0
