"""Drafts by the model's own next-token block, or by an EAGLE-3 head, on a GPU: each step has stored the rows of its
tokens, so that a chain of drafts begins with the token that was sampled last.

If one request drafts alone, its step is launched right behind the chain, and the host learns the drafts with the step's
tokens. With several requests it waits for the chain, as unlikely drafts between others' rows would cost time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeserve.messages.prompt_embeddings import SECTIONS
from moeserve.worker.drafts.drafter import NO_DRAFT, LateDrafts, Wanted
from moeserve.worker.drafts.next_token_drafter import LEAST_PROBABILITY
from moeserve.worker.drafts.shortlist import Shortlist
from moeserve.worker.engines.gpu.next_token_chain import ChainStart, NextTokenChain
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class GpuNextTokenDrafter:
    """A `Drafter` that drafts with a block on a GPU: the model's own next-token block or an EAGLE-3 head."""

    def __init__(
        self,
        sequences: Sequences,
        chain: NextTokenChain,
        least_probability: float = LEAST_PROBABILITY,
        late: LateDrafts | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        """least_probability: drafts that the block considers less likely are not verified, nor are those after them.
        late: where drafts are noted that a step need not wait for; None: every step waits. rotary: RoPE positions of
        requests with pictures; None: they are the tokens' numbers."""
        self._sequences = sequences
        self._chain = chain
        self._least = least_probability
        self._late = late
        self._rotary = rotary
        self._shortlist = Shortlist(sequences.tokens, chain.vocab_size, chain.frequent_tokens)

    def bind(self, slot: int, namespace: str) -> None:
        self._shortlist.bind(slot)
        self._chain.forget(slot)

    def catch_up(self) -> None:
        """Does nothing: steps store the block's rows."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = [NO_DRAFT for _ in wanted]
        active = [at for at, one in enumerate(wanted) if one.most > 0]
        if self._late is not None and self._late.is_allowed and active:
            drafts[active[0]] = self._launch(wanted[active[0]], self._late)
            return drafts
        for first in range(0, len(active), self._chain.most_rows):
            part = active[first : first + self._chain.most_rows]
            for at, draft in zip(part, self._chains([wanted[at] for at in part]), strict=True):
                drafts[at] = draft
        return drafts

    def _launch(self, one: Wanted, late: LateDrafts) -> Int32s:
        """Launches a request's chain. Returns placeholders for its drafts."""
        start = self._start([one])
        self._chain.launch(start)
        late.slot, late.read, late.ms = one.slot, lambda: self._found(start)[0], lambda: self._chain.ms
        return -1 - self._chain.width * np.arange(one.most, dtype=np.int32)

    def _chains(self, wanted: list[Wanted]) -> list[Int32s]:
        start = self._start(wanted)
        self._chain.launch(start)
        return self._found(start)

    def _start(self, wanted: list[Wanted]) -> ChainStart:
        slots, length, most = np.array(wanted, np.int32).T.copy()
        sequences = self._sequences
        places = length - 1 + np.arange(int(most.max()), dtype=np.int32)[:, None]
        # Behind a row's last draft its KV slots are not granted; the chain does not read them.
        kv_slots = sequences.kv_slots[slots, np.minimum(places, sequences.kv_slots.shape[1] - 1)]
        panels = self._shortlist.panels(slots, length)
        # The coverage estimates the probability of the tokens that are not scored.
        shares = np.ones(len(slots), np.float32) if panels is None else self._shortlist.coverage[slots]
        least = (self._least / shares).astype(np.float32)
        return ChainStart(
            *(sequences.tokens[slots, length - 1], length - 2, slots, most, kv_slots, panels, least),
            None if self._rotary is None else self._by_depth(self._rotary, slots, places - 1),
        )

    @staticmethod
    def _by_depth(rotary: RotaryPositions, slots: Int32s, indices: Int32s) -> Int32s:
        """Returns the RoPE positions of tokens: int32 [depths, n, sections]. indices: int32 [depths, n]."""
        of_depths = [rotary.of_tokens(slots, at) for at in indices]
        return np.stack([np.broadcast_to(found, (SECTIONS, len(slots))).T for found in of_depths])

    def _found(self, start: ChainStart) -> list[Int32s]:
        """Waits for a launched chain. Returns the drafts that are to be verified."""
        tokens, probabilities = self._chain.found()
        is_likely = probabilities >= start.least
        is_likely &= np.arange(len(tokens))[:, None] < start.most
        counts = np.where(is_likely.all(axis=0), len(tokens), is_likely.argmin(axis=0))
        return [tokens[:count, at].copy() for at, count in enumerate(counts.tolist())]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Notes the outcome of a step, which has kept the states of its last rows. If those were drafts, the state of
        the last accepted one counts."""
        if layout.drafted is None or not layout.drafted.any():
            return
        has_drafts = layout.drafted > 0
        count = (layout.count - layout.drafted + accepted)[has_drafts]
        rows, ends = layout.offset[has_drafts] + count - 1, layout.start[has_drafts] + count
        self._chain.keep(layout.req_slot[has_drafts], rows, ends)
