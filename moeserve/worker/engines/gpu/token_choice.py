"""The end of a step on a GPU: chooses the tokens, and downloads them with logprobs where requested."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from moeserve.messages.sampling import TokenLogprob
from moeserve.worker.engines.engine import TokenMasks
from moeserve.worker.engines.gpu.sampler import GpuSampler, Scores
from moeserve.worker.engines.gpu.steps.step_completion import StepCompletion
from moeserve.worker.sequences import Int32s


class LogitRows(NamedTuple):
    """Rows of logits on the GPU from which tokens are chosen, padded to one of the sizes for which the head has a CUDA
    graph."""

    logits: Tensor  # float32 [size, vocab]
    slots: Tensor  # int32 [size]: request slots
    num_rows: Tensor  # int32 [1]


class TokenChoice:
    """The token choice of one engine. The host may launch the next step before it reads this step's tokens."""

    def __init__(self, sampler: GpuSampler, done: StepCompletion) -> None:
        self._sampler, self._done = sampler, done
        self._slots: Int32s = np.zeros(0, np.int32)
        self._scores: Scores | None = None
        self._is_marked = False

    def launch(self, rows: LogitRows, slots: Int32s, masks: TokenMasks | None) -> None:
        """See `Engine.sample`. slots: request slots without padding."""
        self._bring(rows, slots, self._sampler.sample(rows.logits, slots, rows.slots, rows.num_rows, masks))

    def launch_ahead(self, rows: LogitRows, slots: Int32s, ahead: Tensor) -> None:
        """Launches like `launch`, for several rows of one slot. ahead: int32 [size], see `GpuSampler.sample_ahead`."""
        self._bring(rows, slots, self._sampler.sample_ahead(rows.logits, rows.slots, rows.num_rows, ahead))

    def _bring(self, rows: LogitRows, slots: Int32s, chosen: Tensor) -> None:
        has_wanted = any(top is not None for top in self._sampler.wanted_logprobs(slots))
        scores = self._sampler.score(rows.logits, chosen, rows.num_rows) if has_wanted else None
        self._scores = None if scores is None else scores.on_host()
        self._slots = slots
        self._done.bring(chosen[: len(slots)])
        self._is_marked = True

    def mark_end(self) -> None:
        """Marks the end of a step, even if it samples nothing."""
        if not self._is_marked:
            self._done.mark()
        self._is_marked = False

    def read(self) -> tuple[Int32s, list[TokenLogprob | None]]:
        """Waits for the tokens of the last launch and returns them."""
        tokens = self._done.brought(len(self._slots))
        if self._scores is None:
            return tokens, [None] * len(tokens)
        return tokens, self._scores.read(self._sampler.wanted_logprobs(self._slots))
