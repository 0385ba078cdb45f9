"""For which sizes a sum over GPUs goes within the norm behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.collectives.fastest_norm import choose_norms
from moeserve.kernels.collectives.sum_norm_op import ROW_TYPE, MessageSize, SumNorm

HIDDEN, EXPERTS = 32, 3
SIZE = MessageSize(1, 80, HIDDEN, EXPERTS)  # of one rank, whose sum is what it has


class Wrong(SumNorm):
    """With more than eight rows."""

    def add_norm(
        self,
        own: Tensor,
        x: Tensor,
        count: Tensor,
        weight: Tensor,
        eps: float,
        y: GpuActivations,
        exact: Tensor | None = None,
        *,
        attended: Tensor | None = None,
    ) -> None:
        super().add_norm(own, x, count, weight, eps, y, exact, attended=attended)
        x[8:] += 1


def chosen(of: type[SumNorm], rows: list[int], seconds: list[float], others: float = 9.0) -> list[bool]:
    """seconds: of each size apart, then within. others: what the other rank says of everything."""
    region = torch.zeros(SIZE.region_bytes, dtype=torch.uint8, device=DEVICE)
    sums = of(0, SIZE, region, [region.data_ptr()])
    taken = iter(seconds)

    def measure(call: Callable[[], None]) -> float:
        call()
        return next(taken)

    choose_norms(
        sums,
        lambda x: None,
        rows,
        HIDDEN,
        EXPERTS,
        torch.device(DEVICE),
        lambda mine: min(mine, others),
        measure,
    )
    messages = [torch.zeros(n, 1, HIDDEN, dtype=torch.float32 if n <= 64 else ROW_TYPE) for n in rows]
    return [sums.takes(message) for message in messages]


@pytest.mark.slow
def test_a_size_whose_norm_sums_faster() -> None:
    assert chosen(SumNorm, [8, 16, 80], [3.0, 2.0, 2.0, 2.5, 3.0, 1.0]) == [True, False, True]


def test_no_size_of_a_few_rows() -> None:
    assert chosen(SumNorm, [1, 4, 8], [3.0, 2.0]) == [False, False, True]


def test_no_size_without_room() -> None:
    assert chosen(SumNorm, [81], []) == [False]


def test_no_size_with_which_it_is_wrong() -> None:
    assert chosen(Wrong, [8, 16], [3.0, 2.0]) == [True, False]


def test_no_size_with_which_another_rank_found_it_wrong() -> None:
    assert chosen(SumNorm, [8], [], others=0.0) == [False]
