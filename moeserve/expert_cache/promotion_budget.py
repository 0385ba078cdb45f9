"""How many promotions a step may start: many while they pay, next to none while they do not.

A promotion reads an expert's weights once, in the background; each step that then uses the expert is spared one read by
the CPU, and each that uses the expert whose slot it took has one read more. Reads spared less reads added, of the pairs
of the last WINDOW steps, is what promotions bring. Where every expert is as likely as another it is nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.expert_cache.policy import Mask, Move

WINDOW = 64  # steps for which a promotion is watched
PERIOD = 16  # steps between two decisions
PAYS = 1.0  # reads that a promotion must spare within WINDOW
GROWTH = 4.0
PROBE = 1 / 8  # promotions a step at the least, by which to notice that a text repeats itself again


class PromotionBudget:
    """One step after another: `observe`, then `take`, then `promoted` for what was promoted."""

    def __init__(self, shape: tuple[int, ...], most: int) -> None:
        """shape: layers, experts of a layer. most: promotions in a step, whatever they bring."""
        long_ago = -WINDOW - 1
        self._came: npt.NDArray[np.int64] = np.full(shape, long_ago)
        self._went: npt.NDArray[np.int64] = np.full(shape, long_ago)
        self._step = 0
        self._most = float(most)
        self._allowance = float(most)  # a step
        self._credit = 0.0
        self._spared = self._pairs = 0.0  # sums that decay: reads spared, and promotions watched

    @property
    def allowance(self) -> float:
        """Promotions a step."""
        return self._allowance

    def observe(self, used: Mask, cached: Mask) -> None:
        """A step used these experts, [layers, experts]; cached: those with a slot at its start."""
        self._step += 1
        since = self._step - WINDOW
        came, went = (self._came >= since) & cached, (self._went >= since) & ~cached
        keep = 1.0 - 1.0 / WINDOW
        self._spared = keep * self._spared + np.count_nonzero(used & came) - np.count_nonzero(used & went)
        self._pairs = keep * self._pairs + np.count_nonzero(came)
        if self._step % PERIOD == 0 and self._pairs >= WINDOW / 2:
            self._decide()

    def take(self) -> int:
        """How many promotions may start now."""
        self._credit = min(self._most, self._credit + self._allowance)
        return int(self._credit)

    def promoted(self, moves: list[Move]) -> None:
        self._credit -= len(moves)
        for layer, incoming, outgoing in moves:
            self._came[layer, incoming] = self._step
            self._went[layer, outgoing] = self._step

    def _decide(self) -> None:
        by_promotion = WINDOW * self._spared / self._pairs
        factor = GROWTH if by_promotion >= PAYS else 1 / GROWTH
        self._allowance = min(self._most, max(PROBE, self._allowance * factor))
