"""Drafts from grammars: if an answer's format allows only one text, such as the property names of a JSON schema, its
tokens are drafted. This costs no time besides their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.sequences import Int32s, StepLayout


class ForcedDrafter:
    """A `Drafter` that drafts the tokens to which a grammar leaves no alternative."""

    def __init__(self, constraints: Constraints) -> None:
        """constraints: created with drafts=True."""
        self._constraints = constraints

    def bind(self, slot: int, namespace: str) -> None:
        """Does nothing; the grammar tracks its answer."""

    def catch_up(self) -> None:
        """Does nothing; no work is postponed."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        if all(one.most <= 0 for one in wanted):
            return [NO_DRAFT for _ in wanted]
        forced = self._constraints.forced([one.slot for one in wanted])
        return [
            np.array(tokens[: max(one.most, 0)], np.int32) for one, tokens in zip(wanted, forced, strict=True)
        ]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Does nothing; the grammar takes tokens as they are sampled."""
