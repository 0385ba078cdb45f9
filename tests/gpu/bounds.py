"""How near to the truth a GPU must be beside llama.cpp: no farther but by chance, and with the same choice as often."""

from __future__ import annotations

import math

from tests.support.measuring.accuracy import Distances

CHANCE = 1.05
TOP1 = 0.01  # of the positions, rounded up: of 384, 4


def assert_near(ours: Distances, rival: Distances) -> None:
    assert ours.median_kl <= CHANCE * rival.median_kl
    # In whole positions, as one is 0.26%.
    positions = len(ours.kl)
    assert round((rival.top1 - ours.top1) * positions) <= math.ceil(TOP1 * positions)
