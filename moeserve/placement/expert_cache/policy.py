"""Chooses the experts in a layer's GPU slots by recency with some frequency, if promotions are worth their cost.

An expert's score is the sum over the steps that used it of DECAY ** (steps since). Among the experts that a step
missed, the one with the highest score may replace the cached expert with the lowest score of its layer, the one with
the second highest score the second lowest, and so on.

Recent exchanges, whether made or only possible, tell whether further exchanges pay (`exchange_value.py`). This module
is the specification. Servers run the same algorithm in C++ (`kernels/csrc/expert_cache`), whose decisions are
identical.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.placement.expert_cache.exchange_value import ExchangeValue, band_of

DECAY = 0.9  # on traces, 0.8 to 0.95 hit equally often; 0.99 hits a tenth less often
PAYS = 1.0  # reads that an exchange must be expected to save; the promotion itself costs one
# Bytes promoted in the background of one step, at most: 46 experts of Qwen3-30B-A3B in Q4_K_M.
STEP_BYTES = 128 << 20
# The same limit for servers that stream no prompts: their staging buffer is separate, and has to fit in the memory that
# the placement leaves to CUDA.
UNSTREAMED_STEP_BYTES = 32 << 20

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]


class Move(NamedTuple):
    """Replaces one expert of a layer by another in its GPU slot."""

    layer: int
    incoming: int
    outgoing: int


class _Candidates(NamedTuple):
    """Exchanges that would raise the cache's score, by layer and best first; [candidates] each."""

    layer: Ids
    incoming: Ids
    outgoing: Ids
    gain: npt.NDArray[np.float32]  # in score

    def only(self, chosen: npt.NDArray[np.int64] | Mask) -> _Candidates:
        return _Candidates(
            self.layer[chosen], self.incoming[chosen], self.outgoing[chosen], self.gain[chosen]
        )


class CachePolicy:
    """Owns the scores and the set of cached experts, which includes experts that are still being copied."""

    def __init__(self, cached: Mask, movable: Mask, decay: float = DECAY, pays: float = PAYS) -> None:
        """cached: bool [layers, experts]. movable: bool [layers, experts]: the experts that may be promoted or
        replaced."""
        self.cached = cached.copy()
        self._movable = movable
        self._decay = np.float32(decay)
        self._pays = pays
        self._scores = np.zeros(cached.shape, np.float32)
        self.value = ExchangeValue(cached.shape)
        self._could: _Candidates | None = None  # candidates of the last `choose`

    def observe(self, used: Mask) -> None:
        """Records the experts that a step used, bool [layers, experts]."""
        self._scores *= self._decay
        self._scores += used

    def choose(self, used: Mask, most: int, *, pays: bool = True, ready: Mask | None = None) -> list[Move]:
        """Returns at most `most` exchanges with the greatest gains in score, and counts them as made. used: the
        experts of the step last given to `observe`. pays: return only exchanges that are expected to pay. ready: bool
        [layers, experts]: the experts that can be promoted now; None: all."""
        found = self._candidates(used)
        if pays:
            self._could = found
            found = found.only(self.value.expected()[band_of(found.gain)] >= self._pays)
        if ready is not None:
            found = found.only(ready[found.layer, found.incoming])
        found = found.only(np.argsort(-found.gain, kind="stable")[: max(0, most)])
        found = found.only(np.argsort(found.layer, kind="stable"))
        self.cached[found.layer, found.incoming], self.cached[found.layer, found.outgoing] = True, False
        return list(map(Move, found.layer.tolist(), found.incoming.tolist(), found.outgoing.tolist()))

    def learn(self, used: Mask) -> None:
        """Updates the estimates of what exchanges save. Call it after `choose`; it is separate so that a server can
        run it while the next step computes."""
        self.value.observe(used)
        if self._could is not None:
            could, self._could = self._could, None
            self.value.watch(could.layer, could.incoming, could.outgoing, band_of(could.gain))

    def _candidates(self, used: Mask) -> _Candidates:
        layers, coming = np.nonzero(used & ~self.cached & self._movable)
        if not len(layers):
            return _Candidates(layers, coming, coming, np.zeros(0, np.float32))
        # Sorted by layer, then by descending score, then by id; `rank` counts within the layer.
        order = np.lexsort((-self._scores[layers, coming], layers))
        layers, coming = layers[order], coming[order]
        rank = np.arange(len(layers)) - np.searchsorted(layers, layers)
        going, old = self._lowest(used, int(rank.max()) + 1)
        gain = self._scores[layers, coming] - old[rank, layers]
        return _Candidates(layers, coming, going[rank, layers], gain).only(gain > 0)

    def _lowest(self, used: Mask, count: int) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Returns ids and scores [count, layers] of each layer's replaceable experts with the lowest scores; the
        score is infinite where a layer has fewer."""
        scores = np.where(self.cached & self._movable & ~used, self._scores, np.inf).astype(
            np.float32, copy=False
        )
        layers = np.arange(len(scores))
        lowest = np.empty((count, len(scores)), np.int64)
        values = np.empty((count, len(scores)), np.float32)
        for rank in range(count):
            lowest[rank] = scores.argmin(axis=1)
            values[rank] = scores[layers, lowest[rank]]
            scores[layers, lowest[rank]] = np.inf
        return lowest, values
