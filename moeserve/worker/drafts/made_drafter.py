"""Creates the drafter for --speculative-config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from moeserve.config import Drafts
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.drafter import Drafter, Wanted
from moeserve.worker.drafts.forced_drafter import ForcedDrafter
from moeserve.worker.drafts.next_token_drafter import LEAST_PROBABILITY, DraftingBlock, NextTokenDrafter
from moeserve.worker.drafts.ngram_drafter import NgramDrafter
from moeserve.worker.drafts.shared_texts import SharedTexts
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

SHARED_MATCH: Final = 8  # longest match required in other requests' texts, in tokens


class FirstOf:
    """A `Drafter` that uses `first`, and `second` for requests for which the first has no drafts."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second

    def bind(self, slot: int, namespace: str) -> None:
        self._first.bind(slot, namespace)
        self._second.bind(slot, namespace)

    def catch_up(self) -> None:
        self._first.catch_up()
        self._second.catch_up()

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = self._first.draft(wanted)
        lacking = [at for at, draft in enumerate(drafts) if len(draft) == 0]
        more = self._second.draft([wanted[at] for at in lacking])
        for at, draft in zip(lacking, more, strict=True):
            drafts[at] = draft
        return drafts

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        self._first.computed(layout, accepted)
        self._second.computed(layout, accepted)


def make_drafter(
    sequences: Sequences,
    drafts: Drafts,
    block: DraftingBlock | None,
    constraints: Constraints,
    *,
    shares_texts: bool,
    small_model: Callable[[Sequences], Drafter] | None = None,
    least_probability: float = LEAST_PROBABILITY,
    keeping: Keeping | None = None,
    rotary: RotaryPositions | None = None,
) -> Drafter:
    """Returns the configured drafter. block: the model's next-token block or an EAGLE-3 head; None if none drafts.
    shares_texts: drafts may come from other requests' texts. small_model: makes the drafter of --speculative-model,
    or of a block on a GPU. least_probability: of the block's drafts. keeping: where the CPU's block notes what it
    spends; None: nowhere. rotary: RoPE positions of requests with pictures, for the CPU's block."""
    of_model: Drafter | None = None
    if small_model is not None:
        of_model = small_model(sequences)
    elif block is not None:
        of_model = NextTokenDrafter(sequences, block, least_probability, keeping=keeping, rotary=rotary)
    of_grammar = ForcedDrafter(constraints)
    if drafts.lookup is None:
        assert of_model is not None
        return FirstOf(of_grammar, of_model)
    shortest, longest = drafts.lookup.shortest, drafts.lookup.longest
    shared = SharedTexts(min(longest, SHARED_MATCH)) if shares_texts else None
    of_text = NgramDrafter(sequences.tokens, shortest, longest, shared)
    of_both = of_text if of_model is None else FirstOf(of_text, of_model)
    return FirstOf(of_grammar, of_both)
