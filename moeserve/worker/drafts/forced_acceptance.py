"""Accepts a given share of drafts, whatever was sampled: for benchmarks with dummy weights, of whose drafts hardly any
is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from moeserve.messages.sampling import TokenLogprob
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.run_sampler import DraftSampling
from moeserve.worker.engines.engine import SampledAtOnce, TokenMasks
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class ForcedAcceptance:
    """Replaces the sampled tokens of `RunSampler`'s engine, so that the share `right` of the drafts is accepted. Only
    drafts whose predecessors were accepted count."""

    def __init__(self, engine: DraftSampling, sequences: Sequences, rows: DraftRows, right: float) -> None:
        self._engine = engine
        self._sequences = sequences
        self._rows = rows
        self._right = right
        self._random = np.random.default_rng(0)

    @property
    def logit_rows(self) -> int:
        return self._engine.logit_rows

    def logits_of(self, rows: Int32s) -> Tensor:
        return self._engine.logits_of(rows)

    def sample_at_once(
        self, logits: Tensor, slots: Int32s, ahead: Int32s
    ) -> Callable[[], SampledAtOnce] | None:
        wait = self._engine.sample_at_once(logits, slots, ahead)
        if wait is None:
            return None

        def judged() -> SampledAtOnce:
            found = wait()
            return found._replace(tokens=self._judged(found.tokens[: len(slots)], slots, ahead))

        return judged

    def sample_from(
        self, logits: Tensor, slots: Int32s, masks: TokenMasks | None
    ) -> tuple[Int32s, list[TokenLogprob | None]]:
        tokens, logprobs = self._engine.sample_from(logits, slots, masks)
        return self._judged(tokens[: len(slots)], slots, np.zeros_like(slots)), logprobs

    def commit_states(self, layout: StepLayout, accepted: Int32s) -> None:
        self._engine.commit_states(layout, accepted)

    def _judged(self, tokens: Int32s, slots: Int32s, ahead: Int32s) -> Int32s:
        """Returns the drafts themselves where they are to be right, and any other tokens elsewhere. Behind a row's last
        draft its token table has a token of an earlier draft, which is as good as any."""
        self._rows.take_late()
        table = self._sequences.tokens
        positions = np.array([self._rows.length[slot] for slot in slots.tolist()], np.int32) + ahead
        drafts = table[slots, np.minimum(positions, table.shape[1] - 1)]
        others = np.where(tokens == drafts, np.maximum(tokens - 1, 0) + (tokens == 0), tokens)
        is_right = self._random.random(len(slots)) < self._right
        judged: Int32s = np.where(is_right, np.maximum(drafts, 0), others).astype(np.int32)
        return judged
