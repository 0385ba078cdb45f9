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
        moves: list[Move] = []
        coming = np.where(used & ~self.cached & self._movable, self._scores, -np.inf)
        going = np.where(self.cached & self._movable & ~used, self._scores, np.inf)
        layers = np.arange(len(coming))
        while len(moves) < most:
            best, least = coming.argmax(axis=1), going.argmin(axis=1)
            new, old = coming[layers, best], going[layers, least]
            # Where both are infinite there is nothing to move.
            gains = np.where(new > old, new, -np.inf) - np.where(new > old, old, 0.0)
            order = np.argsort(-gains, kind="stable")[: most - len(moves)]
            chosen = order[gains[order] > 0.0]
            if not len(chosen):
                break
            coming[chosen, best[chosen]], going[chosen, least[chosen]] = -np.inf, np.inf
            self.cached[chosen, best[chosen]], self.cached[chosen, least[chosen]] = True, False
            moves += map(Move, chosen.tolist(), best[chosen].tolist(), least[chosen].tolist())
        return moves
