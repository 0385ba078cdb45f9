"""Admission: a request joins the running batch if the KV pool is predicted to suffice for all its requests.

Nothing is reserved. A request takes KV slots as it grows, and its final length is predicted, so a prediction may be
wrong. The pool is then exhausted and a request is preempted (`running_batch.py`), which costs time but causes
neither errors nor deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from moeserve.router.core.batch.output_history import OutputHistory
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request


def peak_tokens(requests: Iterable[tuple[int, int]]) -> int:
    """Returns the peak number of KV slots held together by requests, given as (held, remaining), if each takes one
    slot per step and frees all at its end.

    The peak is reached just before some request ends. With the requests sorted by `remaining`, longest first, at the
    end of the k-th the first k still run and hold sum(held of the first k) + k * remaining of the k-th. LightLLM's
    request queue uses the same estimate. O(n log n).
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
    def __init__(self, memory: SequenceMemory) -> None:
        self._memory = memory
        self.history = OutputHistory()
        self.max_kv_total = 0  # sum of max_kv over the running batch, in KV slots

    def admits(self, running: Iterable[Request], candidate: Request) -> bool:
        """Returns whether `candidate` may join `running`: whether the KV pool has a slot for each token at the
        predicted peak of all of them. All prompts count as fully computed, because they will be before any request
        ends. A request is always admitted if no other request is running."""
        if self.max_kv_total + candidate.max_kv <= self._memory.num_slots:
            return True
        lengths = []
        brought = 0
        for request in running:
            slots = request.num_slots
            brought += slots - request.borrowed
            known = max(slots, request.target)
            lengths += self._lengths(request, known - request.borrowed, known)
        if not lengths:
            return True
        matched, idle = self._memory.lookup(candidate)
        known = len(candidate.tokens)
        lengths += self._lengths(candidate, known - (matched - idle), known)
        # Shared slots remain held after the request that computed them has left, until the last request that shares
        # them ends; no single request's count includes them.
        lasting = self._memory.num_held - brought
        return lasting + peak_tokens(lengths) <= self._memory.num_slots

    def _lengths(self, request: Request, held: int, known: int) -> list[tuple[int, int]]:
        """Returns (held, remaining) for each row of the request; all held slots count for the first row. Beams that
        share slots need fewer than this."""
        if request.beams is not None:
            known = request.num_prompt + max(request.num_output - 1, 0)
        remaining = self._remaining(request, known)
        return [(held, remaining), *[(0, remaining)] * (request.width - 1)]

    def _remaining(self, request: Request, known: int) -> int:
        """Returns the KV slots that each row of the request is predicted to take after `known` tokens."""
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
        self.max_kv_total += request.max_kv

    def left(self, request: Request) -> None:
        self.max_kv_total -= request.max_kv
