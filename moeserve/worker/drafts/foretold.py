"""Guesses the token that a request's sampler will draw from one model's logits, from another model's.

The sampler lays the probabilities of the tokens end to end, and takes the token at a point that the request's seed and
the number of its output tokens determine. A drafting model's probabilities end at other places, so the token at that
point is a good guess only where it is far from the ends. Here the places are unsure by `SPREAD` (a logistic
distribution), and the guess is the token that is then most probably at the point: near to greedy where the point says
little, and surer than the likeliest token's own probability where it says much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from moeserve.worker.engines.cpu.sampler import Draw

# With 0.3 as the standard deviation of errors in the demonstration model's scales, 0.03 to 0.2 were tried.
SPREAD: Final = 0.1


# Arguments: float32 [vocab] logits, a request slot, and a position of its text. None: the request is greedy.
Foretell = Callable[[torch.Tensor, int, int], Draw | None]


def guess(draw: Draw, spread: float = SPREAD) -> tuple[int, float]:
    """Returns a token, and the probability that it is drawn."""
    ends = np.cumsum(draw.weights, dtype=np.float64)
    edges = np.concatenate([[0.0], ends / ends[-1]])
    # The point is certainly between 0 and 1, so the part of the distribution outside is cut off.
    before = 0.5 + 0.5 * np.tanh((edges - draw.point) / (2 * spread))
    shares = np.diff(before)
    at = int(shares.argmax())
    return int(draw.token_ids[at]), float(shares[at] / (before[-1] - before[0]))
