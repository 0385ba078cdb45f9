"""What conftest.py changes for this folder's tests changes no result."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.linear import op
from moeserve.kernels.linear.operands import weight_of
from tests.kernels import weights
from tests.kernels.quantization.plane_tensors import planes_of, tensors
from tests.kernels.weights import activations


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU takes the tiles that are chosen")
@pytest.mark.parametrize(
    ("kind", "rows", "cols", "tokens"),
    [
        (weights.Type.F32, 24, 4096, 1),
        (weights.Type.F32, 70, 320, 3),
        (weights.Type.F16, 300, 2048, 2),
        (weights.Type.BF16, 33, 96, 8),
    ],
)
def test_more_rows_in_a_program_give_the_same_sums(
    kind: weights.Type, rows: int, cols: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = planes_of(kind, rows, cols)
    matrix, x = tensors(planes), activations("outlier channels", tokens, cols)
    weight = weight_of(matrix, int(kind), cols)

    def product() -> torch.Tensor:
        out = torch.empty(tokens, rows)
        op.linear(x, None, None, counter(tokens), matrix, int(kind), None, 0, cols, out)
        return out

    many_rows = product()
    assert op.gemv_tile(weight).br == 32
    monkeypatch.undo()
    assert op.gemv_tile(weight).br < 8
    assert torch.equal(product(), many_rows)
