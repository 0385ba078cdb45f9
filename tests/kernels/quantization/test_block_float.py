"""Products and attention in block floating point beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moeserve.kernels.block_float import PackedMatrix, attention, has_block_float, takes_heads

pytestmark = pytest.mark.skipif(not has_block_float(), reason="this CPU lacks AVX-512 VNNI")


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def rounded(x: Tensor) -> Tensor:
    return x.half().double()


@pytest.mark.parametrize(("rows", "inner", "out"), [(1, 2, 1), (97, 129, 33), (200, 1152, 70), (13, 47, 64)])
def test_product(rows: int, inner: int, out: int) -> None:
    """The error is below that of inputs rounded to float16, whatever the numbers' size."""
    torch.manual_seed(rows)
    x, matrix, bias = torch.randn(rows, inner), torch.randn(out, inner), torch.randn(out)
    x *= 10.0 ** torch.linspace(-20, 15, rows)[:, None]
    found = PackedMatrix(matrix).product(x, bias)
    assert found.shape == (rows, out)
    for row, each in zip(found, x, strict=True):
        truth = matrix.double() @ each.double()
        size = max(float(truth.norm()), float(bias.norm()))
        assert (row.double() - truth - bias).norm() < 4e-4 * size
    small = torch.randn(rows, inner)
    truth = small.double() @ matrix.double().T
    assert error(PackedMatrix(matrix).product(small, None), truth) < max(
        error(rounded(small) @ rounded(matrix).T, truth), 1e-4
    )


def test_sums_that_fill_int32() -> None:
    """Numbers of equal size and sign, and a block with one number only."""
    x = torch.ones(2, 256)
    x[1, 1:] = 0.0
    matrix = torch.ones(32, 256)
    assert torch.allclose(PackedMatrix(matrix).product(x, None), x @ matrix.T, rtol=1e-3)
    assert torch.allclose(PackedMatrix(-matrix).product(x, None), -x @ matrix.T, rtol=1e-3)
    assert not PackedMatrix(matrix).product(torch.zeros(1, 256), None).any()
    for bad in (float("nan"), float("inf")):
        x[1, 200] = bad
        found = PackedMatrix(matrix).product(x, None)
        assert found[0].isfinite().all()
        assert found[1].isnan().all()


@pytest.mark.parametrize(("heads", "rows", "dim"), [(2, 1, 72), (1, 64, 128), (3, 200, 88), (2, 333, 16)])
@pytest.mark.parametrize("sharpness", [0.3, 5.0])
def test_attention(heads: int, rows: int, dim: int, sharpness: float) -> None:
    torch.manual_seed(dim)
    q, k, v = (torch.randn(heads, rows, dim) * size for size in (sharpness, 1.0, 3.0))
    q, k, v = (
        part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v)
    )  # strided, as a tower's
    truth = scaled_dot_product_attention(*(part.double()[None] for part in (q, k, v)))[0]
    half = scaled_dot_product_attention(*(rounded(part)[None] for part in (q, k, v)))[0]
    found = attention(q, k, v)
    assert found.shape == (rows, heads * dim)
    flat = truth.transpose(0, 1).flatten(1)
    assert error(found, flat) < error(half.transpose(0, 1).flatten(1), flat) + 1e-4
    assert error(attention(q, k, v, 2.0 / dim**0.5), flat) > 1e-2 or rows == 1


def test_a_key_that_takes_most_of_the_weight() -> None:
    """Small weights of the other blocks are not lost beside it: their codes are relative to their own block."""
    n, dim = 4096, 64
    q = torch.zeros(1, 64, dim)
    q[..., 0] = 8.0
    k = torch.zeros(1, n, dim)
    k[0, 5, 0] = 12.0  # e ** 12 times the others' weight
    v = torch.ones(1, n, dim)
    v[0, 5] = 0.0
    q, k, v = (part[:, : 64 if part is q else n] for part in (q, k, v))
    q = q.repeat(1, n // 64, 1)
    truth = scaled_dot_product_attention(q.double()[None], k.double()[None], v.double()[None])[0]
    assert 0.01 < float(truth.mean()) < 0.05
    assert error(attention(q, k, v), truth.transpose(0, 1).flatten(1)) < 0.02


def test_bits_do_not_depend_on_rows_and_threads() -> None:
    torch.manual_seed(1)
    x, packed = torch.randn(150, 300), PackedMatrix(torch.randn(70, 300))
    whole = packed.product(x, None)
    for row in (0, 11, 95, 96, 149):
        assert torch.equal(packed.product(x[row : row + 1], None)[0], whole[row])
    q, k, v = (torch.randn(2, 150, 32) for _ in range(3))
    threads, attended = torch.get_num_threads(), attention(q, k, v)
    try:
        torch.set_num_threads(3)
        assert torch.equal(packed.product(x, None), whole)
        assert torch.equal(attention(q, k, v), attended)
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_taken() -> None:
    assert [takes_heads(dim) for dim in (72, 128, 7, 130)] == [True, True, False, False]
    with pytest.raises(ValueError, match="heads of an even number of at most 128"):
        attention(*(torch.zeros(1, 3, 7) for _ in range(3)))
    with pytest.raises(ValueError, match="x: rows of 4 elements wanted, not 5"):
        PackedMatrix(torch.zeros(3, 4)).product(torch.zeros(2, 5), None)
