"""Tracks the grammars that the worker has: each is sent once, with the first sequence that uses it.

Sending it each time would be slow: a grammar may have megabytes, and each of a request's choices shares it and may be
bound many times.
"""

from __future__ import annotations

import itertools
from collections import Counter

from msgspec.structs import replace

from moeserve.messages.steps import NewSeq, StepPlan


class SentGrammars:
    """Owned by the scheduler. A grammar without open requests is dropped with the next plan, which the worker
    executes after all plans that use it."""

    def __init__(self) -> None:
        self._users = Counter[str]()  # grammar → number of open requests
        self._numbers: dict[str, int] = {}  # grammar → its number on the worker
        self._next = itertools.count(1)  # 0 means no grammar
        self._dropped: list[int] = []  # numbers dropped since the last plan

    def joined(self, grammar: str) -> None:
        """Notes an open request with this grammar; "" means none."""
        if grammar:
            self._users[grammar] += 1

    def left(self, grammar: str) -> None:
        if not grammar:
            return
        self._users[grammar] -= 1
        if not self._users[grammar]:
            del self._users[grammar]
            if grammar in self._numbers:
                self._dropped.append(self._numbers.pop(grammar))

    def worker_lost(self) -> None:
        """Forgets which grammars were sent: a new worker has none."""
        self._numbers.clear()
        self._dropped.clear()

    def shared(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with grammars replaced by numbers, and the texts that the worker lacks added."""
        if not self._dropped and not any(seq.sampling.grammar for seq in plan.new_seqs):
            return plan
        texts: dict[int, str] = {}
        seqs = [self._by_number(seq, texts) for seq in plan.new_seqs]
        dropped, self._dropped = self._dropped, []
        return replace(plan, new_seqs=seqs, grammars=texts, dropped_grammars=dropped)

    def _by_number(self, seq: NewSeq, texts: dict[int, str]) -> NewSeq:
        """Adds the grammar to `texts` if the worker lacks it."""
        grammar = seq.sampling.grammar
        if not grammar:
            return seq
        number = self._numbers.get(grammar)
        if number is None:
            number = self._numbers[grammar] = next(self._next)
            texts[number] = grammar
        return replace(seq, sampling=replace(seq.sampling, grammar=""), grammar=number)
