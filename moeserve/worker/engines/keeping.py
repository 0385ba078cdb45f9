"""What keeping up with the texts costs a block that drafts, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Keeping:
    """The time that the model's own block, or an EAGLE-3 head, spends on keeping up with the texts, whether it drafts
    or not. `DraftRows` writes `is_on` and resets `ms` for each step; what keeps up adds to `ms`: the CPU's drafter, or
    a GPU's `BlockSteps`."""

    is_on: bool = True  # False: the block need not keep up
    ms: float = 0.0
