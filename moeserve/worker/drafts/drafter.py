"""What drafts: tokens that are likely to come next, to be verified in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from moeserve.worker.sequences import Int32s, StepLayout

NO_DRAFT: Final = np.zeros(0, np.int32)


class Wanted(NamedTuple):
    """Up to `most` tokens that may follow the first `length` tokens of the request in `slot`."""

    slot: int
    length: int
    most: int  # 0 or less: none, but the text is there to be learnt


class Drafter(Protocol):
    """Called by the step loop. A draft is a guess: the time that a request takes depends on it, and nothing else."""

    def bind(self, slot: int, namespace: str) -> None:
        """A request is about to take its slot, whose old text is still there. namespace: NewSeq's."""
        ...

    def catch_up(self) -> None:
        """Does what is owed to the steps so far, before `draft` is asked for any."""
        ...

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        """The drafts of a step, before it is computed; no slot twice. None where there is no good guess. The KV slots
        of their positions, and of the one before, are in the request's table."""
        ...

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """A step has been computed and sampled. accepted: int32 [rows], drafts of each that were right."""
        ...
