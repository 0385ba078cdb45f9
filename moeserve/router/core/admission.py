"""Who may join the running requests: those beside whom the pool is expected to suffice.

Nothing is reserved. A request takes slots as it grows, and its length is predicted, so the answer may be
wrong; then the pool runs dry and somebody is paused (`running_batch.py`), at the cost of a delay. A wrong estimate
never makes an error or a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from moeserve.router.core.kv_memory import KvMemory
from moeserve.router.core.output_history import OutputHistory
from moeserve.router.core.request import Request


def peak_tokens(requests: Iterable[tuple[int, int]]) -> int:
    """The most slots that requests, each (held, remaining), hold at once if all take one slot a step and
    give theirs back at their end.

    The peak is reached just before somebody's end: with the requests sorted by `remaining`, longest first,
    those still there at the end of the k-th hold sum(held of the first k) + k * remaining of the k-th. (The
    estimate of LightLLM's request queue.) O(n log n).
    """
    peak = total_held = 0
    ordered = sorted(requests, key=itemgetter(1), reverse=True)
    for count, (held, remaining) in enumerate(ordered, start=1):
        total_held += held
        then = total_held + count * remaining
        if then > peak:
            peak = then
    return peak


class AdmissionPolicy:
    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self.history = OutputHistory()
        self.promised = 0  # sum of max_kv over the running

    def admits(self, running: Iterable[Request], candidate: Request) -> bool:
        """Whether `candidate` may run beside `running`. Its prompt and theirs are taken as computed, for they
        are before anyone's end. Nobody beside it: always."""
        if self.promised + candidate.max_kv <= self._memory.num_slots:
            return True
        lengths = []
        brought = 0
        for request in running:
            slots = len(request.slots)
            brought += slots - request.borrowed
            known = max(slots, request.target)
            lengths.append((known - request.borrowed, self._more(request, known)))
        if not lengths:
            return True
        matched, idle = self._memory.lookup(candidate)
        known = len(candidate.tokens)
        lengths.append((known - (matched - idle), self._more(candidate, known)))
        # What is held of the cache beyond what the running brought or woke outlasts any one of them.
        lasting = self._memory.num_held - brought
        return lasting + peak_tokens(lengths) <= self._memory.num_slots

    def _more(self, request: Request, known: int) -> int:
        """Slots that it will take beyond `known`, as far as one can tell."""
        if request.num_output >= request.predicted_output:
            self._predict(request)
        end = request.num_prompt + request.predicted_output - 1
        return end - known if end > known else 0

    def _predict(self, request: Request) -> None:
        if not request.quantile:
            request.quantile = self.history.draw()
        so_far, most = request.num_output, request.sampling.max_tokens
        if so_far < most:
            request.predicted_output = self.history.predict(so_far, most, request.quantile)

    def joined(self, request: Request) -> None:
        self.promised += request.max_kv

    def left(self, request: Request) -> None:
        self.promised -= request.max_kv
