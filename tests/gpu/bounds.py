"""How near to the truth a GPU must be beside llama.cpp: no farther but by chance, and with the same choice as often."""

from __future__ import annotations

import math

from benchmarks.accuracy import Distances

CHANCE = 1.05
TOP1 = 0.01  # of the positions, rounded up: of 384, 4
# Where the file's weights are floats, large steps round what they are multiplied with, and the router's input, to 16
# bits: measured (whole prompts) 1.46e-6 for F16, where llama.cpp is at 1.38e-6, and 4.64e-5 for BF16 with 6 choices
# fewer, where it is at 3.61e-5 (its router has float32). A quantised type is 1e-4 or farther.
ROUNDING = {"f16": (2e-6, 0.01), "bf16": (5e-5, 0.02)}


def assert_near(name: str, ours: Distances, rival: Distances, *, large_steps: bool) -> None:
    """name: the fixture's, which ends in its type."""
    exact = (0.0, TOP1)
    floor, top1 = ROUNDING.get(name.rpartition("-")[2], exact) if large_steps else exact
    assert ours.median_kl <= max(CHANCE * rival.median_kl, floor)
    # In whole positions, as one is 0.26%: Q8_0 in chunks agrees at 347, llama.cpp at 351, which is 1.04%.
    positions = len(ours.kl)
    assert round((rival.top1 - ours.top1) * positions) <= math.ceil(top1 * positions)
