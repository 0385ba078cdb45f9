"""Drafts by grammars: where an answer's format leaves one text only, names of a schema's properties for example, its
tokens are drafted. They cost no time but their rows'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.sequences import Int32s, StepLayout


class ForcedDrafter:
    """See `Drafter`."""

    def __init__(self, constraints: Constraints) -> None:
        """constraints: made for drafts."""
        self._constraints = constraints

    def bind(self, slot: int, namespace: str) -> None:
        """The grammar knows where its answer is."""

    def catch_up(self) -> None:
        """Nothing is put off."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        if all(one.most <= 0 for one in wanted):
            return [NO_DRAFT for _ in wanted]
        forced = self._constraints.forced([one.slot for one in wanted])
        return [
            np.array(tokens[: max(one.most, 0)], np.int32) for one, tokens in zip(wanted, forced, strict=True)
        ]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """The grammar takes tokens as they are sampled."""
