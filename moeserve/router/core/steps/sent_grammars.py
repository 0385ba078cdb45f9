"""Which grammars the worker has: each is sent once, beside the first sequence of it that a plan binds.

A grammar may have megabytes, and the choices of a request have the same one, each of which may be bound many times.
"""

from __future__ import annotations

import itertools
from collections import Counter

from msgspec.structs import replace

from moeserve.messages.steps import NewSeq, StepPlan


class SentGrammars:
    """Written by the scheduler. A grammar without an open request is dropped with the next plan, which the worker
    executes after those that name it."""

    def __init__(self) -> None:
        self._users = Counter[str]()  # open requests by grammar
        self._numbers: dict[str, int] = {}  # of those that the worker has
        self._next = itertools.count(1)  # 0: no grammar
        self._dropped: list[int] = []  # since the last plan

    def joined(self, grammar: str) -> None:
        """A request is open; "" is no grammar."""
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
        """The next one has none."""
        self._numbers.clear()
        self._dropped.clear()

    def shared(self, plan: StepPlan) -> StepPlan:
        """The plan with its sequences' grammars by number, and the texts that the worker does not have."""
        if not self._dropped and not any(seq.sampling.grammar for seq in plan.new_seqs):
            return plan
        texts: dict[int, str] = {}
        seqs = [self._by_number(seq, texts) for seq in plan.new_seqs]
        dropped, self._dropped = self._dropped, []
        return replace(plan, new_seqs=seqs, grammars=texts, dropped_grammars=dropped)

    def _by_number(self, seq: NewSeq, texts: dict[int, str]) -> NewSeq:
        """Adds the grammar to `texts` where the worker does not have it."""
        grammar = seq.sampling.grammar
        if not grammar:
            return seq
        number = self._numbers.get(grammar)
        if number is None:
            number = self._numbers[grammar] = next(self._next)
            texts[number] = grammar
        return replace(seq, sampling=replace(seq.sampling, grammar=""), grammar=number)
