"""How long answers have been lately, to tell how long those under way will get.

The Past-Future scheduler's idea (Gong et al., ASPLOS 2025): lengths of recent answers are a sample of the
lengths to come. Each request draws its length from those that are longer than what it has put out already, so
the predictions of a batch are spread as the lengths will be, and the peak of their sum is about right though
each may be wrong. The draw is a quantile fixed per request, so that an estimate does not change by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 1000  # answers remembered, the figure of the paper
# Before anything is known, and then a thousandth of what is: mostly short, some long.
PRIOR = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
MIN_MORE = 16  # tokens; an answer longer than any before it is expected to go on by an eighth, or so many

_GOLDEN = 0.6180339887498949  # multiples of it modulo 1 fill the interval evenly, wherever one stops


class OutputHistory:
    def __init__(self) -> None:
        self._recent = deque(PRIOR)
        self._sorted = sorted(PRIOR)
        self._draws = 0

    @property
    def mean(self) -> float:
        return sum(self._recent) / len(self._recent)

    def add(self, length: int) -> None:
        """An answer ended after `length` tokens, by itself or at its limit."""
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
        """Tokens of an answer in all, of which `so_far` are there, `so_far` < `most`: more than `so_far`, at
        most `most`."""
        longer = bisect_right(self._sorted, so_far)
        left = len(self._sorted) - longer
        if left == 0:
            return min(so_far + max(MIN_MORE, so_far // 8), most)
        return min(self._sorted[longer + int(quantile * left)], most)
