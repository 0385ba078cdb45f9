"""An expert cache's policy that moves experts in every step, for tests of what moves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.placement.expert_cache.policy import Mask

Ids = npt.NDArray[np.int64]


class RandomPolicy:
    """In every step that can, one expert of each layer goes and another comes, whatever the step used."""

    def __init__(self, cached: Mask, movable: Mask) -> None:
        self._cached, self._movable = cached, movable
        self._rng = np.random.default_rng(0)

    def observe(self, counts: Ids, *, streamed: bool) -> int:
        return int((counts > 0).sum())

    def choose(self, most: int, *, pays: bool, ready: Mask | None = None) -> Ids:
        moves = []
        for layer, (cached, movable) in enumerate(zip(self._cached, self._movable, strict=True)):
            if movable.any():
                incoming = int(self._rng.choice(np.flatnonzero(~cached & movable)))
                outgoing = int(self._rng.choice(np.flatnonzero(cached & movable)))
                cached[incoming], cached[outgoing] = True, False
                moves.append((layer, incoming, outgoing))
        return np.array(moves, np.int64)

    def adopt(self, cached: Mask) -> None:
        self._cached = cached

    def scores(self) -> npt.NDArray[np.float32]:
        return np.zeros(self._cached.shape, np.float32)

    def learn(self) -> None:
        pass

    def forget(self) -> None:
        pass
