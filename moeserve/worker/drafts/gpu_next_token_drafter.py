"""Drafts by the model's own next-token block, or by an EAGLE-3 head, on a GPU: steps store the rows of their tokens, so
that a chain of drafts begins with the token that was sampled last. While `Keeping.is_on` is False no rows are stored;
then a request has no drafts until a step has stored its last token's row again.

If one request drafts alone, its step is launched right after the chain, and the host learns the drafts with the step's
tokens. With several requests it waits for the chain, as unlikely drafts between others' rows would cost time.

The chain is launched after the step that still samples the tokens before it, if the next plan is there: the GPU drafts
while the host reads these tokens and prepares the next step. Drafts of look-up, known only then, replace the chain's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.messages.prompt_embeddings import SECTIONS
from moeserve.worker.drafts.drafter import NO_DRAFT, LateDrafts, PendingTokens, Wanted
from moeserve.worker.drafts.next_token_drafter import LEAST_PROBABILITY
from moeserve.worker.drafts.shortlist import Shortlist
from moeserve.worker.engines.gpu.next_token_chain import AfterStep, ChainStart, LaunchedChain, NextTokenChain
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class _Chain(NamedTuple):
    start: ChainStart
    launched: LaunchedChain


class GpuNextTokenDrafter:
    """A `Drafter` that drafts with a block on a GPU: the model's own next-token block or an EAGLE-3 head."""

    def __init__(
        self,
        sequences: Sequences,
        chain: NextTokenChain,
        least_probability: float = LEAST_PROBABILITY,
        late: LateDrafts | None = None,
        rotary: RotaryPositions | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        """least_probability: drafts that the block considers less likely are not verified, nor are those after them.
        late: where drafts are noted that a step need not wait for; None: every step waits. rotary: RoPE positions of
        requests with pictures; None: they are the tokens' numbers. keeping: the steps' (`BlockSteps`); None: all store
        their rows."""
        self._sequences = sequences
        self._chain = chain
        self._least = least_probability
        self._late = late
        self._rotary = rotary
        self._shortlist = Shortlist(sequences.tokens, chain.vocab_size, chain.frequent_tokens)
        self._ahead: _Chain | None = None  # launched for the next step
        self._keeping = Keeping() if keeping is None else keeping
        # By request slot, whether its last row is stored.
        self._is_kept = np.zeros(len(sequences.num_prompt), np.bool_)
        if late is not None:
            late.launch_ahead = self.launch_ahead

    def bind(self, slot: int, namespace: str) -> None:
        self._shortlist.bind(slot)
        self._chain.forget(slot)
        self._is_kept[slot] = False

    def catch_up(self) -> None:
        """Does nothing: steps store the block's rows (`BlockSteps`)."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = [NO_DRAFT for _ in wanted]
        active = [at for at, one in enumerate(wanted) if one.most > 0 and self._is_kept[one.slot]]
        ahead, self._ahead = self._ahead, None
        if self._late is not None and self._late.is_allowed and active:
            one = wanted[active[0]]
            drafts[active[0]] = self._later(one, ahead or self._launch([one]), self._late)
            return drafts
        if ahead is not None and active:
            self._note_ms(ahead)
            found = dict(zip(ahead.start.req_slots.tolist(), self._found(ahead), strict=True))
            for at in active:
                drafts[at] = found.get(wanted[at].slot, NO_DRAFT)[: wanted[at].most]
            return drafts
        for first in range(0, len(active), self._chain.most_rows):
            part = active[first : first + self._chain.most_rows]
            chain = self._launch([wanted[at] for at in part])
            for at, draft in zip(part, self._found(chain), strict=True):
                drafts[at] = draft
        return drafts

    def launch_ahead(self, wanted: Sequence[Wanted], pending: PendingTokens) -> bool:
        """See `LateDrafts`."""
        if not self._keeping.is_on:  # the step before stores no rows
            return False
        active = [one for one in wanted if one.most > 0]
        of_slot = {slot: at for at, slot in enumerate(pending.slots.tolist())}
        rows = [of_slot[one.slot] for one in active if one.slot in of_slot]
        if (
            not 0 < len(active) == len(rows) <= self._chain.most_rows
            or len(pending.places) > 1 + self._chain.depths
        ):
            return False
        slots, _, most = np.array(active, np.int32).T.copy()
        first = pending.positions[rows]
        depths = int(pending.drafted[rows].max()) + int(most.max())
        after_step = AfterStep(
            pending.rows[rows],
            pending.drafted[rows],
            first,
            np.zeros_like(slots) if self._rotary is None else self._shifts(self._rotary, slots, first),
            pending.places[:, rows],
            self._kv_slots(slots, first, depths),
        )
        none = np.zeros_like(slots)
        start = ChainStart(
            none, none, slots, most, none[None], *self._scored(slots, first), after_step=after_step
        )
        self._ahead = _Chain(start, self._chain.launch(start))
        return True

    def _later(self, one: Wanted, chain: _Chain, late: LateDrafts) -> Int32s:
        """Returns placeholders for the drafts of a request whose chain is launched."""
        late.slot, late.read = one.slot, lambda: self._found(chain)[0]
        self._note_ms(chain)
        return -1 - self._chain.width * np.arange(one.most, dtype=np.int32)

    def _note_ms(self, chain: _Chain) -> None:
        if self._late is not None:
            self._late.ms = lambda: chain.launched.ms

    def _launch(self, wanted: list[Wanted]) -> _Chain:
        start = self._start(wanted)
        return _Chain(start, self._chain.launch(start))

    def _start(self, wanted: list[Wanted]) -> ChainStart:
        slots, length, most = np.array(wanted, np.int32).T.copy()
        depths = int(most.max())
        rotary = None
        if self._rotary is not None:
            places = length - 2 + np.arange(depths, dtype=np.int32)[:, None]
            rotary = self._by_depth(self._rotary, slots, places)
        return ChainStart(
            *(self._sequences.tokens[slots, length - 1], length - 2, slots, most),
            self._kv_slots(slots, length - 1, depths),
            *self._scored(slots, length),
            rotary,
        )

    def _kv_slots(self, slots: Int32s, first: Int32s, count: int) -> Int32s:
        """Returns the KV slots of `count` positions of each request: int32 [count, n]."""
        places = first + np.arange(count, dtype=np.int32)[:, None]
        # After a row's last draft its KV slots are not granted; the chain does not read them.
        table = self._sequences.kv_slots
        found: Int32s = table[slots, np.minimum(places, table.shape[1] - 1)]
        return found

    def _scored(self, slots: Int32s, length: Int32s) -> tuple[Int32s | None, npt.NDArray[np.float32]]:
        """Returns the vocabulary's panels to score, and the least probability of each request's drafts."""
        panels = self._shortlist.panels(slots, length)
        # The coverage estimates the probability of the tokens that are not scored.
        shares = np.ones(len(slots), np.float32) if panels is None else self._shortlist.coverage[slots]
        return panels, (self._least / shares).astype(np.float32)

    @staticmethod
    def _shifts(rotary: RotaryPositions, slots: Int32s, indices: Int32s) -> Int32s:
        """Returns by how much the RoPE positions of these tokens, which are sampled, exceed their numbers: int32 [n].
        No picture has a sampled token, whereas the one before it may be a picture's, with three positions."""
        shifts: Int32s = rotary.of_tokens(slots, indices) - indices
        return shifts

    @staticmethod
    def _by_depth(rotary: RotaryPositions, slots: Int32s, indices: Int32s) -> Int32s:
        """Returns the RoPE positions of tokens: int32 [depths, n, sections]. indices: int32 [depths, n]."""
        of_depths = [rotary.of_tokens(slots, at) for at in indices]
        return np.stack([np.broadcast_to(found, (SECTIONS, len(slots))).T for found in of_depths])

    def _found(self, chain: _Chain) -> list[Int32s]:
        """Waits for a launched chain. Returns the drafts that are to be verified."""
        start = chain.start
        tokens, probabilities = chain.launched.found()
        is_likely = probabilities >= start.least
        is_likely &= np.arange(len(tokens))[:, None] < start.most
        counts = np.where(is_likely.all(axis=0), len(tokens), is_likely.argmin(axis=0))
        return [tokens[:count, at].copy() for at, count in enumerate(counts.tolist())]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Notes the outcome of a step, which has kept the states of its last rows. If those were drafts, the state at
        the last accepted one is kept instead. accepted: int32 [sequences], the number of accepted drafts of each."""
        self._is_kept[layout.req_slot] = self._keeping.is_on
        if not self._keeping.is_on:
            return
        if layout.drafted is None or not layout.drafted.any():
            return
        has_drafts = layout.drafted > 0
        if self._ahead is not None:  # it has kept the states of its requests
            kept = set(self._ahead.start.req_slots.tolist())
            has_drafts &= np.array([slot not in kept for slot in layout.req_slot.tolist()], np.bool_)
            if not has_drafts.any():
                return
        count = (layout.count - layout.drafted + accepted)[has_drafts]
        rows, ends = layout.offset[has_drafts] + count - 1, layout.start[has_drafts] + count
        self._chain.keep(layout.req_slot[has_drafts], rows, ends)
