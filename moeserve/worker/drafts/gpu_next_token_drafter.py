"""Drafts by the model's own next-token block on a GPU: each step has stored the block's rows of its tokens, so that a
chain of drafts begins with the token that was sampled last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.drafts.next_token_drafter import LEAST_PROBABILITY
from moeserve.worker.engines.gpu.next_token_chain import ChainStart, NextTokenChain
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class GpuNextTokenDrafter:
    """A `Drafter`."""

    def __init__(
        self, sequences: Sequences, chain: NextTokenChain, least_probability: float = LEAST_PROBABILITY
    ) -> None:
        """least_probability: drafts that the block considers less likely are not verified, nor are those after them."""
        self._sequences = sequences
        self._chain = chain
        self._least = least_probability

    def bind(self, slot: int, namespace: str) -> None:
        self._chain.forget(slot)

    def catch_up(self) -> None:
        """Does nothing: steps store the block's rows."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = [NO_DRAFT for _ in wanted]
        active = [at for at, one in enumerate(wanted) if one.most > 0]
        for first in range(0, len(active), self._chain.most_rows):
            part = active[first : first + self._chain.most_rows]
            for at, draft in zip(part, self._chains([wanted[at] for at in part]), strict=True):
                drafts[at] = draft
        return drafts

    def _chains(self, wanted: list[Wanted]) -> list[Int32s]:
        slots, length, most = np.array(wanted, np.int32).T.copy()
        sequences = self._sequences
        places = length - 1 + np.arange(int(most.max()), dtype=np.int32)[:, None]
        # Behind a row's last draft its KV slots are not granted; the chain does not read them.
        kv_slots = sequences.kv_slots[slots, np.minimum(places, sequences.kv_slots.shape[1] - 1)]
        tokens, probabilities = self._chain.draft(
            ChainStart(sequences.tokens[slots, length - 1], length - 2, slots, most, kv_slots)
        )
        is_likely = probabilities >= self._least
        is_likely &= np.arange(len(tokens))[:, None] < most
        counts = np.where(is_likely.all(axis=0), len(tokens), is_likely.argmin(axis=0))
        return [tokens[:count, at].copy() for at, count in enumerate(counts.tolist())]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """The step has kept the states of its last rows; where those were drafts, that of the last accepted one
        counts."""
        if layout.drafted is None or not layout.drafted.any():
            return
        has_drafts = layout.drafted > 0
        count = (layout.count - layout.drafted + accepted)[has_drafts]
        rows, ends = layout.offset[has_drafts] + count - 1, layout.start[has_drafts] + count
        self._chain.keep(layout.req_slot[has_drafts], rows, ends)
