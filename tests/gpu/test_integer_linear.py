"""Products with whole matrices with weights as integers in float16 (kernels/linear/integers.py), against the reference,
on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from moeserve.kernels.linear.integer_pieces import (
    MOST_PIECES,
    PIECE_TOKENS,
    partial_numbers,
    pieces_by_columns,
)
from moeserve.kernels.linear.integers import DenseIntegers, IntegerRows
from moeserve.kernels.planes import dequantize
from tests.kernels.quantization.plane_tensors import planes_of
from tests.kernels.triton_device import counter
from tests.kernels.weights import Type, nmse

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


def products(n: int, widest: int) -> DenseIntegers:
    """Poisoned, so that what is not written shows."""
    return DenseIntegers(
        IntegerRows(
            torch.full((n, widest), torch.nan, dtype=torch.float16, device="cuda"),
            torch.full((n, widest // 16), torch.nan, dtype=torch.float16, device="cuda"),
            torch.full((n,), torch.nan, device="cuda"),
        ),
        torch.full((partial_numbers(n),), torch.nan, device="cuda"),
    )


@pytest.mark.parametrize(("rows", "cols"), [(5120, 2048), (2048, 4096), (200, 768), (64, 512), (1000, 256)])
@pytest.mark.parametrize(("n", "live"), [(4, 3), (8, 8), (16, 9), (32, 32), (64, 50), (128, 100)])
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K])
def test_product(kind: Type, n: int, live: int, rows: int, cols: int) -> None:
    """Three times, because counters must be 0 again; numbers differ by 10^6, and the widest input is wider."""
    matrix = planes_of(kind, 1, rows, cols)
    exact = dequantize(matrix).double().view(rows, cols)
    dense = products(n, 2 * cols)
    assert dense.takes(matrix)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, cols, generator=g) * 10.0 ** torch.randint(-3, 4, (n, 1), generator=g)
        x = x.bfloat16().cuda()
        out = torch.full((n, rows), torch.nan, device="cuda")
        dense.multiply(dense.order(x, counter(live)), [matrix], out)
        for i in range(live):
            assert nmse(out[i].double().cpu(), (exact @ x[i].double()).cpu()) < 1e-6


@pytest.mark.parametrize(("n", "live"), [(4, 4), (8, 5), (16, 16)])
def test_two_matrices_side_by_side(n: int, live: int) -> None:
    """As queries, keys and values of two types, of float32 activations. Rows beyond `n` have no room, and none is
    written."""
    sizes, cols = (4160, 72), 4352
    kinds = zip((Type.Q4_K, Type.Q6_K), sizes, strict=True)
    matrices = [planes_of(kind, 1, rows, cols) for kind, rows in kinds]
    dense = products(n, cols)
    room = torch.full((n + 1, sum(sizes)), -7.0, device="cuda")
    x = torch.randn(n, cols, generator=torch.Generator().manual_seed(n)).cuda()
    dense.multiply(dense.order(x, counter(live)), matrices, room[:n])
    assert (room[n] == -7).all()
    exact = torch.cat([dequantize(matrix).double().view(-1, cols) for matrix in matrices])
    for i in range(live):
        assert nmse(room[i].double().cpu(), (exact @ x[i].double()).cpu()) < 1e-6


@pytest.mark.parametrize(
    ("rows", "n", "pieces"),
    [
        ((4608, 512), 16, (144, 32)),  # as Qwen3-30B-A3B's q and k, and v
        ((1024, 512), 64, (128, 64)),
        ((4096, 512), 16, (256, 32)),  # too many together
        ((4096, 512), 64, (256, 64)),
    ],
)
def test_two_matrices_that_share_results_may_overlap(
    rows: tuple[int, int], n: int, pieces: tuple[int, int]
) -> None:
    """Both products, in Q4_K and in Q6_K, divide their results among pieces, whose sums and counters lie in the same
    memory. The second one starts before the first has ended, unless MOST_PIECES are too few for both."""
    cols, dense, blocks = 2048, products(n, 2048), -(-n // PIECE_TOKENS)
    splits = [pieces_by_columns(some, cols // 256, blocks) for some in rows]
    assert min(splits) > 1
    assert tuple(-(-some // 64) * blocks * split for some, split in zip(rows, splits, strict=True)) == pieces
    matrices = [
        planes_of(kind, 1, some, cols) for kind, some in zip((Type.Q4_K, Type.Q6_K), rows, strict=True)
    ]
    x = torch.randn(n, cols, generator=torch.Generator().manual_seed(n)).bfloat16().cuda()
    ordered = dense.order(x, counter(n))
    results = []
    for _ in range(50):
        out = torch.full((n, sum(rows)), torch.nan, device="cuda")
        dense.multiply(ordered, matrices, out)
        results.append(out)
    assert all(torch.equal(one, results[0]) for one in results)
    exact = torch.cat([dequantize(matrix).double().view(-1, cols) for matrix in matrices])
    for of_matrix, expected in zip(
        results[0].cpu().split(rows, dim=1),
        (x.double().cpu() @ exact.cpu().T).split(rows, dim=1),
        strict=True,
    ):
        assert nmse(of_matrix.double(), expected) < 1e-6


def test_only_wide_matrices() -> None:
    memory = products(8, 8192)
    dense = DenseIntegers(memory._ordered, memory._partials, only_wide=True)
    assert dense.takes(planes_of(Type.Q4_K, 1, 4096, 4352))
    assert not dense.takes(planes_of(Type.Q4_K, 1, 4096, 4096))
    assert not dense.takes(planes_of(Type.Q4_K, 1, 2048, 4352))


def test_what_is_not_taken() -> None:
    dense = products(16, 512)
    assert dense.takes(planes_of(Type.Q4_K, 1, 256, 512))
    assert not dense.takes(planes_of(Type.Q4_K, 1, 256, 768))  # wider than its memory
    assert not dense.takes(planes_of(Type.Q5_K, 1, 256, 512))


def test_the_sum_of_pieces_is_the_same_each_time() -> None:
    """Whichever piece comes last."""
    n, rows, cols = 16, 2048, 4096
    assert pieces_by_columns(rows, cols // 256, 1) > 1
    matrix, dense = planes_of(Type.Q4_K, 1, rows, cols), products(n, cols)
    ordered = dense.order(torch.randn(n, cols, device="cuda").bfloat16(), counter(n))
    results = []
    for _ in range(50):
        out = torch.empty(n, rows, device="cuda")
        dense.multiply(ordered, [matrix], out)
        results.append(out)
    assert all(torch.equal(one, results[0]) for one in results)
    assert rows // 64 * pieces_by_columns(rows, cols // 256, 1) <= MOST_PIECES
