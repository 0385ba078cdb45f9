"""Predicts the lengths of answers from the lengths of recent answers.

The idea is from the Past-Future scheduler (Gong et al., ASPLOS 2025): recent lengths are a sample of the
distribution of future lengths. Each request draws its predicted length from the recent lengths that exceed its
output so far. The predictions of a batch then have the right distribution, and their peak sum is about right
although each single one may be wrong. The draw is a quantile fixed per request, so that a prediction does not
fluctuate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 1000  # recent answers that are kept, as in the paper
# Assumed lengths at the start, mostly short with a long tail; each counts as one answer until WINDOW real ones exist.
PRIOR = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
# An answer longer than all recent ones is predicted to grow by an eighth, at least by this many tokens.
MIN_MORE = 16

_GOLDEN = 0.6180339887498949  # multiples modulo 1 are a low-discrepancy sequence in [0, 1)


class OutputHistory:
    """Lengths of recent answers, in tokens."""

    def __init__(self) -> None:
        self._recent = deque(PRIOR)
        self._sorted = sorted(PRIOR)
        self._draws = 0

    @property
    def mean(self) -> float:
        """The mean length of recent answers, in tokens."""
        return sum(self._recent) / len(self._recent)

    def add(self, length: int) -> None:
        """Records the length of an answer that ended by a stop token or at its limit."""
        insort(self._sorted, length)
        self._recent.append(length)
        if len(self._recent) > WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def draw(self) -> float:
        """Returns the quantile, in [0, 1), for the next request."""
        self._draws += 1
        return self._draws * _GOLDEN % 1.0

    def predict(self, so_far: int, most: int, quantile: float) -> int:
        """Returns the predicted total length in tokens of an answer that has `so_far` < `most` tokens: more than
        `so_far`, at most `most`."""
        longer = bisect_right(self._sorted, so_far)
        left = len(self._sorted) - longer
        if left == 0:
            return min(so_far + max(MIN_MORE, so_far // 8), most)
        return min(self._sorted[longer + int(quantile * left)], most)
