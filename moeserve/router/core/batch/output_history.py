"""Predicts how long answers will be from the lengths of recent answers.

This is the idea of the Past-Future scheduler (Gong et al., ASPLOS 2025): recent lengths are a sample of the
distribution of lengths to come. Each request draws its length from the recent lengths that exceed its output so far.
So the predictions of a batch are distributed as its lengths will be, and the peak of their sum is about right although
each of them may be wrong. The draw is a quantile that is fixed for each request, so that a prediction does not change
by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 1000  # answers remembered, as in the paper
# Lengths assumed at the start, mostly short with a long tail; each counts as one answer until WINDOW others have ended.
PRIOR = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Tokens; an answer longer than any recent one is predicted to grow by an eighth, or by this many.
MIN_MORE = 16

_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are a low-discrepancy sequence in [0, 1)


class OutputHistory:
    """Lengths of answers in tokens."""

    def __init__(self) -> None:
        self._recent = deque(PRIOR)
        self._sorted = sorted(PRIOR)
        self._draws = 0

    @property
    def mean(self) -> float:
        """The mean length of recent answers, in tokens."""
        return sum(self._recent) / len(self._recent)

    def add(self, length: int) -> None:
        """Records an answer that ended after `length` tokens, by itself or at its limit."""
        insort(self._sorted, length)
        self._recent.append(length)
        if len(self._recent) > WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def draw(self) -> float:
        """The next request's quantile, in [0, 1)."""
        self._draws += 1
        return self._draws * _GOLDEN % 1.0

    def predict(self, so_far: int, most: int, quantile: float) -> int:
        """The predicted total length, in tokens, of an answer that has `so_far` < `most` tokens: more than `so_far` and
        at most `most`."""
        longer = bisect_right(self._sorted, so_far)
        left = len(self._sorted) - longer
        if left == 0:
            return min(so_far + max(MIN_MORE, so_far // 8), most)
        return min(self._sorted[longer + int(quantile * left)], most)
