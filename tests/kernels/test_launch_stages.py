"""A kernel whose tiles want more shared memory than the GPU has is compiled with fewer of them on their way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from triton.runtime.errors import OutOfResources

import tests.kernels.triton_device  # noqa: F401
from moeserve.kernels.launch import DEFAULT_STAGES, Kernel


class Function:
    """Fits with so many stages; remembers with which it was asked for."""

    cache_key = ""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.asked: list[int] = []

    def warmup(self, *_: object, grid: object, num_stages: int = DEFAULT_STAGES, **options: int) -> object:
        self.asked.append(num_stages)
        kernel = type("Compiled", (SimpleNamespace,), {"run": property(lambda _: self._load(num_stages))})
        return kernel(stages=num_stages, **options)

    def _load(self, stages: int) -> None:
        if stages > self.fits:
            raise OutOfResources(stages, self.fits, "shared memory")


def fewer(fits: int, **options: int) -> tuple[dict[str, int], list[int]]:
    function = Function(fits)
    found = Kernel(function).with_fewer_stages((1,), (), options, OutOfResources(9, 1, "shared memory"))
    return found, function.asked


def test_the_most_stages_that_fit() -> None:
    assert fewer(2, num_stages=4, num_warps=8) == ({"num_stages": 2, "num_warps": 8}, [3, 2])
    assert fewer(1, num_warps=4) == ({"num_stages": 1, "num_warps": 4}, [2, 1])


def test_a_kernel_that_does_not_fit_says_so() -> None:
    with pytest.raises(OutOfResources, match="Required: 9"):
        fewer(0, num_stages=3)
