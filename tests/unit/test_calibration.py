"""The prefill threshold: where two lines cross."""

from __future__ import annotations

import pytest

from moeserve.worker.calibration import crossover

SIZES = [64, 128, 256, 512]


@pytest.mark.parametrize("fixed", [0.1, 0.2, 0.3, 0.5])
def test_lines_cross_where_it_says(fixed: float) -> None:
    """The CPU takes 1 ms a token, the stream `fixed` seconds and 0.05 ms a token."""
    found = crossover(lambda n, streamed: fixed + 5e-5 * n if streamed else 1e-3 * n, [*SIZES, 1024])
    assert found == pytest.approx(fixed / 0.95e-3, abs=1)


def test_always_and_never() -> None:
    assert crossover(lambda n, streamed: 0.0 if streamed else 1.0, SIZES) == 64
    assert crossover(lambda n, streamed: 1.0 if streamed else 0.0, SIZES) is None


def test_measures_no_more_than_it_needs() -> None:
    asked: list[int] = []

    def time_step(n: int, streamed: bool) -> float:
        asked.append(n)
        return 0.15 if streamed else 1e-3 * n

    assert 128 < (crossover(time_step, SIZES) or 0) < 256
    assert asked == [64, 64, 128, 128, 256, 256]
