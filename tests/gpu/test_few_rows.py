"""Products of a few rows on int8 tensor cores (kernels/linear/few_rows.py), against the reference, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.linear.few_rows_op import takes_few_rows
from moeserve.kernels.linear.op import linear
from moeserve.kernels.linear.operands import Weight, weight_of
from moeserve.kernels.planes import dequantize
from moeserve.kernels.quantize.reference import quantize, round_trip
from tests.kernels.quantization.plane_tensors import GUARD, planes_of, tensors
from tests.kernels.triton_device import counter
from tests.kernels.weights import Type, activations, nmse

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


def weight(kind: Type, rows: int, cols: int) -> Weight:
    return weight_of(tensors(planes_of(kind, 1, rows, cols)), int(kind), cols)


@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q6_K), (Type.Q6_K, Type.Q4_K)])
@pytest.mark.parametrize(
    ("rows", "second_rows", "cols"), [(4608, 512, 2048), (40, 24, 4096), (200, 16, 1024), (7, 3, 512)]
)
@pytest.mark.parametrize(("n", "live"), [(8, 8), (8, 5), (5, 5)])
def test_product(n: int, live: int, rows: int, second_rows: int, cols: int, kinds: tuple[Type, Type]) -> None:
    """With one matrix and with two. Of rows that are not there nothing is written."""
    matrices = [planes_of(kind, 1, some, cols) for kind, some in zip(kinds, (rows, second_rows), strict=True)]
    assert takes_few_rows(n, *(weight_of(tensors(p), int(p.type), cols) for p in matrices))
    x = activations("outlier channels", n, cols)
    q = quantize(x)
    codes, scales = q.codes.cuda(), q.scales.cuda()
    first, second = ((tensors(p), int(p.type)) for p in matrices)
    exact = torch.cat([dequantize(p).double().view(-1, cols) for p in matrices]).cpu()
    expected = round_trip(x).double() @ exact.T
    others: list[tuple[list[torch.Tensor] | None, int, int]] = [(None, 0, 0), (*second, second_rows)]
    for other, kind, more in others:
        width = rows + more
        out = torch.full((n, width), GUARD, device="cuda")
        linear(None, codes, scales, counter(live), *first, other, kind, cols, out)
        assert nmse(out[:live].cpu(), expected[:live, :width]) < 1e-12
        assert (out[live:] == GUARD).all()


def test_what_is_not_taken() -> None:
    four_bits = weight(Type.Q4_K, 32, 512)
    assert takes_few_rows(8, four_bits)
    assert not takes_few_rows(4, four_bits)
    assert not takes_few_rows(8, weight(Type.Q4_K, 32, 1536))
    assert not takes_few_rows(9, four_bits)
    for kind in (Type.Q5_K, Type.Q8_0, Type.IQ4_XS, Type.BF16):
        assert not takes_few_rows(8, four_bits, weight(kind, 32, 512))
