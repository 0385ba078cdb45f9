"""Which experts a layer's slots in GPU memory hold: recency with a little frequency, a layer at a time.

An expert's score is 1 for each step that used it, less by DECAY with each step since. Of the experts that a step
missed, those with the highest scores replace those with the lowest of their layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DECAY = 0.9  # docs/results/2026-11-22-expert-cache-replay.md

Mask = npt.NDArray[np.bool_]


class Move(NamedTuple):
    """An expert takes the slot of another of its layer."""

    layer: int
    incoming: int
    outgoing: int


class CachePolicy:
    """Owns scores and which experts are cached, those included that are on their way."""

    def __init__(self, cached: Mask, movable: Mask, decay: float = DECAY) -> None:
        """cached: [layers, experts]. movable: those that may come and go; the others stay where they are."""
        self.cached = cached.copy()
        self._movable = movable
        self._decay = np.float32(decay)
        self._scores = np.zeros(cached.shape, np.float32)

    def observe(self, used: Mask) -> None:
        """A step used these experts, each of which it read once."""
        self._scores *= self._decay
        self._scores += used

    def choose(self, used: Mask, most: int) -> list[Move]:
        """At most so many moves, of the greatest gains in score; they count as done. `used`: the step's, observed."""
        layers, coming = np.nonzero(used & ~self.cached & self._movable)
        if most <= 0 or not len(layers):
            return []
        # Candidates by layer, the highest score first, of equals the lower id; `rank` counts within the layer.
        order = np.lexsort((-self._scores[layers, coming], layers))
        layers, coming = layers[order], coming[order]
        rank = np.arange(len(layers)) - np.searchsorted(layers, layers)
        going, old = self._lowest(used, int(rank.max()) + 1)
        new, old = self._scores[layers, coming], old[rank, layers]
        better = new > old
        layers, coming, going = layers[better], coming[better], going[rank, layers][better]
        # A move of each layer, then the next of each: when there are too many, those of the greatest gains.
        first = np.lexsort((layers, old[better] - new[better], rank[better]))[:most]
        layers, coming, going = layers[first], coming[first], going[first]
        self.cached[layers, coming], self.cached[layers, going] = True, False
        return list(map(Move, layers.tolist(), coming.tolist(), going.tolist()))

    def _lowest(self, used: Mask, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
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
