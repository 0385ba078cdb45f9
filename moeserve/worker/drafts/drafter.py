"""What drafts: tokens that are likely to come next, to be verified in one step."""

from __future__ import annotations

from typing import Protocol

from moeserve.worker.sequences import Int32s


class Drafter(Protocol):
    """Called by the step loop. A draft is a guess: the time that a request takes depends on it, and nothing else."""

    def bind(self, slot: int) -> None:
        """A request takes its slot, whatever the slot held."""
        ...

    def draft(self, slot: int, length: int, most: int) -> Int32s:
        """Up to `most` tokens that may follow the first `length` tokens of the request in `slot`; none where there is
        no good guess."""
        ...
