"""Which of several ways to sum over GPUs is taken."""

from __future__ import annotations

import torch
from torch import Tensor

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.collectives.fastest import FastestSum, Way


class Doubling:
    """The sum of two ranks that have the same numbers."""

    def __init__(self, seconds: float, most: int = 100, error: float = 0.0) -> None:
        self.seconds = seconds
        self._most = most
        self._error = error
        self.calls = 0

    def takes(self, x: Tensor) -> bool:
        return x.numel() <= self._most

    def __call__(self, x: Tensor) -> None:
        self.calls += 1
        x += x + self._error

    def try_once(self, x: Tensor) -> None:
        x += x + self._error


def seconds_of(way: Way, _: Tensor) -> float:
    assert isinstance(way, Doubling)
    return way.seconds


def test_the_fastest_way_that_is_right_and_takes_the_size() -> None:
    safe, fast, small, wrong = Doubling(3.0), Doubling(2.0), Doubling(1.0, most=4), Doubling(0.5, error=1.0)
    add = FastestSum(safe, [fast, small, wrong], lambda number: number, seconds_of)
    for size, chosen in ((4, small), (8, fast)):
        before = chosen.calls
        x = torch.ones(size)
        add(x)
        assert torch.equal(x, torch.full((size,), 2.0))
        assert chosen.calls == before + 1
    assert wrong.calls == 0


def test_a_way_that_another_rank_found_wrong_is_not_taken() -> None:
    safe, fast = Doubling(3.0), Doubling(2.0)
    others = iter([1.0, 9.9, 0.0])  # of the other rank: safe is right, its seconds, fast is not
    add = FastestSum(safe, [fast], lambda number: min(number, next(others)), seconds_of)
    add(torch.ones(4))
    assert fast.calls == 0
