"""For the tests of whole models on the GPU engine: fewer programs under Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest

from moeserve.kernels.linear import op
from moeserve.kernels.linear.operands import Weight
from tests.kernels.triton_device import DEVICE


@pytest.fixture(autouse=True)
def many_rows_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each program 32 rows of a float matrix. Small matrices have a program for each row, which took the
    interpreter half of a test's time, because it needs as long for one row as for 32. The sums keep their bits.
    tests/kernels/quantization tests the tiles that a GPU takes."""
    if DEVICE == "cuda":
        return
    chosen = op.gemv_tile

    def with_more_rows(weight: Weight, **options: Any) -> op.GemvTile:
        tile = chosen(weight, **options)
        return replace(tile, br=32) if weight.format is None else tile

    monkeypatch.setattr(op, "gemv_tile", with_more_rows)
