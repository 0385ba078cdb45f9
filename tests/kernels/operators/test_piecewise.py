"""Piecewise attention and its gradients against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.attention.reference import Sequence
from moeserve.kernels.attention.reference import attention as paged_attention
from moeserve.kernels.operators.piecewise import op, reference
from moeserve.kernels.operators.piecewise.forward import forward_kernel
from tests.kernels.weights import nmse
from tests.support.nightly import nightly_after

# batch, heads, kv_heads, m, n, dim, distance. FLOAT's tiles are 32 rows by 32.
SHAPES = {
    "chunk": (1, 1, 1, 40, 40, 16, 13),
    "groups": (2, 4, 2, 5, 33, 16, 20),
    "behind a prefix": (1, 2, 1, 5, 70, 16, 36),
    "more queries than keys": (1, 1, 1, 70, 37, 16, 9),
    "odd width": (1, 1, 1, 34, 34, 24, 10),
    "all near": (1, 1, 1, 35, 35, 16, 1000),
    "all far": (1, 1, 1, 35, 35, 16, 0),
    "long": (1, 1, 1, 100, 130, 16, 64),
}


def differentiated(
    inputs: tuple[Tensor, ...], gradient: Tensor, distance: int, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients by autograd of the reference."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, _ = reference.piecewise_attention(*leaves, distance, causal)
        return torch.autograd.grad(out, leaves, gradient.double())


CASES = [
    *[pytest.param(name, True, id=f"{name}, causal") for name in SHAPES if name != "long"],
    *[
        pytest.param(name, False, id=f"{name}, both ways")
        for name in ("chunk", "groups", "more queries than keys")
    ],
    *[pytest.param("long", causal, id=f"long {causal}", marks=pytest.mark.slow) for causal in (False, True)],
]
DTYPES = [torch.float32, *([torch.float16, torch.bfloat16] if DEVICE == "cuda" else [])]
LIMITS = {torch.float32: 1e-10, torch.float16: 1e-5, torch.bfloat16: 1e-4}


def inputs_of(
    name: str, dtype: torch.dtype = torch.float32, factor: int = 1
) -> tuple[tuple[Tensor, ...], int]:
    batch, heads, kv_heads, m, n, dim, distance = SHAPES[name]
    g = torch.Generator().manual_seed(len(name))
    shapes = [(batch, heads, m * factor, dim), (batch, kv_heads, n * factor, dim)]
    tensors = [torch.randn(shapes[i], generator=g).to(dtype) for i in (0, 1, 0, 1, 1)]
    return tuple(tensors), distance * factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "causal"), nightly_after(3, CASES))
def test_forward_and_gradients(name: str, dtype: torch.dtype, causal: bool) -> None:
    inputs, distance = inputs_of(name, dtype, 1 if dtype == torch.float32 else 7)
    there = tuple(x.to(DEVICE) for x in inputs)
    out, lse = op.forward(*there, distance, causal)
    expected, expected_lse = reference.piecewise_attention(*inputs, distance, causal)
    assert out.dtype == dtype
    assert nmse(out.cpu(), expected) < LIMITS[dtype]
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=LIMITS[dtype] ** 0.5)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    mine = op.backward(there, out, lse, gradient.to(DEVICE), distance, causal)
    theirs = differentiated(inputs, gradient, distance, causal)
    for x, y in zip(reference.gradients(inputs, gradient, distance, causal), theirs, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(mine, theirs, strict=True):
        assert x.dtype == dtype
        if y.double().abs().max() < 1e-12:  # a pair that no score is of
            assert x.abs().max() < 1e-5
        else:
            assert nmse(x.cpu(), y.double()) < 10 * LIMITS[dtype]


@pytest.mark.skipif(DEVICE != "cuda", reason="halves of so many rows take the interpreter minutes")
@pytest.mark.parametrize("few", [0, op.FEW_ROWS])
def test_the_tiles_of_few_rows_and_of_many(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "FEW_ROWS", few)
    inputs, distance = inputs_of("behind a prefix", torch.float16, 20)
    out, _ = op.forward(*(x.to(DEVICE) for x in inputs), distance, True)
    assert nmse(out.cpu(), reference.piecewise_attention(*inputs, distance, True)[0]) < LIMITS[torch.float16]


def test_the_reference_is_attention_where_the_pairs_are_equal() -> None:
    (q, k, _, _, v), distance = inputs_of("behind a prefix")
    n, m = v.shape[2], q.shape[2]
    out, _ = reference.piecewise_attention(q, k, q, k, v, distance, True)
    expected = paged_attention(
        q[0].transpose(0, 1) * q.shape[3] ** -0.5, k[0].transpose(0, 1), v[0].transpose(0, 1),
        [Sequence(0, m, n - m, torch.arange(n))],
    )  # fmt: skip
    assert nmse(out[0].transpose(0, 1).flatten(1), expected) < 1e-20


def test_the_distance_chooses_the_pair() -> None:
    """Scores by hand: of the last of four positions, the keys 2 and more behind take the second pair."""
    q = torch.ones(1, 1, 1, 1)
    k1, k2 = torch.tensor([1.0, 2, 3, 4]).view(1, 1, 4, 1), torch.tensor([5.0, 6, 7, 8]).view(1, 1, 4, 1)
    out, lse = reference.piecewise_attention(q, k1, q, k2, k1, 2, True, 1.0)
    scores = torch.tensor([5.0, 6, 3, 4], dtype=torch.float64)
    assert torch.allclose(out.flatten(), (scores.softmax(0) * k1.flatten()).sum()[None])
    assert torch.allclose(lse.flatten(), scores.logsumexp(0))


def test_strides_and_scale() -> None:
    inputs, distance = inputs_of("groups")
    turned = tuple(x.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
    assert not turned[0].is_contiguous()
    out, _ = op.forward(*turned, distance, True, 0.3)
    assert nmse(out.cpu(), reference.piecewise_attention(*inputs, distance, True, 0.3)[0]) < 1e-10


def test_another_length_is_no_other_kernel() -> None:
    (q1, k1, q2, k2, v), _ = inputs_of("chunk")
    q1, k1, q2, k2, v = (x.to(DEVICE) for x in (q1, k1, q2, k2, v))
    op.forward(q1, k1, q2, k2, v, 3, True)
    kernels = len(forward_kernel._compiled)
    op.forward(q1[:, :, :16], k1, q2[:, :, :16], k2, v, 4, True)
    assert len(forward_kernel._compiled) == kernels


def test_refusals() -> None:
    x = torch.zeros(1, 2, 3, 16)
    for wrong, message in (
        ((x, x, x[:, :1], x, x, 1), "must be alike"),
        ((x, x[:, :, :, :8], x, x[:, :, :, :8], x[:, :, :, :8], 1), "do not fit"),
        ((x, x.double(), x, x, x, 1), "types"),
        ((x, x, x, x, x, -1), "at least 0"),
        ((x.repeat(1, 1, 1, 17),) * 5 + (1,), "at most 256"),
    ):
        with pytest.raises(ValueError, match=message):
            op.forward(*wrong, True)
