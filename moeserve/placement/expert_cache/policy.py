"""Which experts a layer's slots in GPU memory hold: recency with a little frequency, as far as it pays.

An expert's score is 1 for each step that used it, less by DECAY with each step since. Of the experts that a step
missed, the one with the highest score may replace the one with the lowest of its layer, the next the next.

Whether such an exchange pays is told by those of the last steps, made or not (`exchange_value.py`). This is the
specification; servers run the same in C++ (`kernels/csrc/expert_cache`), with the same decisions to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.placement.expert_cache.exchange_value import ExchangeValue, band_of

DECAY = 0.9  # 0.8 to 0.95 find as many on traces; 0.99 finds a tenth fewer
PAYS = 1.0  # reads that an exchange must be expected to spare: a promotion is one itself
# Promoted in the background of one step at most: 46 experts of Qwen3-30B-A3B in Q4_K_M.
STEP_BYTES = 128 << 20
# The same where no prompt is streamed: what they pass through has memory of its own then, within what the
# placement leaves to CUDA itself.
UNSTREAMED_STEP_BYTES = 32 << 20

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]


class Move(NamedTuple):
    """An expert takes the slot of another of its layer."""

    layer: int
    incoming: int
    outgoing: int


class _Candidates(NamedTuple):
    """Exchanges that would raise a score, by layer and the best first: [candidates] each."""

    layer: Ids
    incoming: Ids
    outgoing: Ids
    gain: npt.NDArray[np.float32]  # in score

    def only(self, chosen: npt.NDArray[np.int64] | Mask) -> _Candidates:
        return _Candidates(
            self.layer[chosen], self.incoming[chosen], self.outgoing[chosen], self.gain[chosen]
        )


class CachePolicy:
    """Owns scores and which experts are cached, those included that are on their way."""

    def __init__(self, cached: Mask, movable: Mask, decay: float = DECAY, pays: float = PAYS) -> None:
        """cached: [layers, experts]. movable: the experts that may come and go; the others stay where they are."""
        self.cached = cached.copy()
        self._movable = movable
        self._decay = np.float32(decay)
        self._pays = pays
        self._scores = np.zeros(cached.shape, np.float32)
        self.value = ExchangeValue(cached.shape)
        self._could: _Candidates | None = None  # what the last `choose` has found

    def observe(self, used: Mask) -> None:
        """A step used these experts, each of which it read once."""
        self._scores *= self._decay
        self._scores += used

    def choose(self, used: Mask, most: int, *, pays: bool = True) -> list[Move]:
        """At most `most` moves with the greatest gains in score; they count as done. `used`: the step's, observed.
        pays: only moves that are expected to pay."""
        found = self._candidates(used)
        if pays:
            self._could = found
            found = found.only(self.value.expected()[band_of(found.gain)] >= self._pays)
        found = found.only(np.argsort(-found.gain, kind="stable")[: max(0, most)])
        found = found.only(np.argsort(found.layer, kind="stable"))
        self.cached[found.layer, found.incoming], self.cached[found.layer, found.outgoing] = True, False
        return list(map(Move, found.layer.tolist(), found.incoming.tolist(), found.outgoing.tolist()))

    def learn(self, used: Mask) -> None:
        """After `choose`: what the step tells of exchanges, made or not. Apart, as a server has time for it when the
        next step is under way."""
        self.value.observe(used)
        if self._could is not None:
            could, self._could = self._could, None
            self.value.watch(could.layer, could.incoming, could.outgoing, band_of(could.gain))

    def _candidates(self, used: Mask) -> _Candidates:
        layers, coming = np.nonzero(used & ~self.cached & self._movable)
        if not len(layers):
            return _Candidates(layers, coming, coming, np.zeros(0, np.float32))
        # By layer, the highest score first, of equals the lower id; `rank` counts within the layer.
        order = np.lexsort((-self._scores[layers, coming], layers))
        layers, coming = layers[order], coming[order]
        rank = np.arange(len(layers)) - np.searchsorted(layers, layers)
        going, old = self._lowest(used, int(rank.max()) + 1)
        gain = self._scores[layers, coming] - old[rank, layers]
        return _Candidates(layers, coming, going[rank, layers], gain).only(gain > 0)

    def _lowest(self, used: Mask, count: int) -> tuple[Ids, npt.NDArray[np.float32]]:
        """[count, layers]: of each layer's experts that may go, those of the lowest scores, and these; infinite where
        there are no more."""
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
