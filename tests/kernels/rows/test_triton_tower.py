"""A tower's operations between products against their references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels import launch
from moeserve.kernels.tower import attention, op, reference
from tests.kernels.rows.triton_rows import normal
from tests.kernels.weights import nmse

EPS = 1e-6
HALF = torch.float16
# Rows in fours and others; columns that fill their block and others.
SIZES = [(8, 64), (5, 72)]


@pytest.mark.parametrize(("n", "cols"), SIZES)
def test_layer_norm(n: int, cols: int) -> None:
    x, weight, bias = 3 * normal(n, cols) + 1, normal(cols, seed=1), normal(cols, seed=2)
    truth = reference.layer_norm(x, weight, bias, EPS)
    y, rest = op.layer_norm(*(each.to(DEVICE) for each in (x, weight, bias)), EPS, HALF, is_exact=True)
    assert rest is not None
    assert nmse(y.cpu(), truth) < 1e-7  # float16's rounding alone
    assert nmse(y.cpu().double() + rest.cpu().double(), truth) < 1e-12
    again, none = op.layer_norm(*(each.to(DEVICE) for each in (x, weight, bias)), EPS, HALF)
    assert none is None
    assert torch.equal(again, y)


@pytest.mark.parametrize(("n", "heads", "dim"), [(8, 4, 32), (5, 3, 12)])
@pytest.mark.parametrize("is_plain", [False, True])
def test_split_heads(n: int, heads: int, dim: int, *, is_plain: bool) -> None:
    """Plain: one product without a bias, whose q and k do not rotate."""
    width = heads * dim
    first, rest, bias = normal(n, 3 * width), normal(n, 3 * width, seed=1) / 1000, normal(3 * width, seed=2)
    angles = normal(n, dim // 2, seed=3)
    turns = angles.cos(), angles.sin()
    if is_plain:
        truth = reference.split_heads(first, None, None, None, heads)
        found = op.split_heads(first.to(DEVICE), None, None, None, heads, HALF)
    else:
        truth = reference.split_heads(first.double() + rest, bias, *turns, heads)
        on_device = tuple(each.to(DEVICE) for each in turns)
        found = op.split_heads(
            first.to(DEVICE), rest.to(DEVICE), bias.to(DEVICE), (on_device[0], on_device[1]), heads, HALF
        )
    assert found.shape == (3, n, heads, dim)
    assert nmse(found.cpu(), truth) < 1e-7  # float16's rounding alone


@pytest.mark.parametrize(("n", "cols"), [*SIZES, (4, op.GELU_COLUMNS + 8)])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(n: int, cols: int, approximate: str) -> None:
    product, bias = 3 * normal(n, cols), normal(cols, seed=1)
    product[0, :4] = torch.tensor([-80.0, 80.0, -6e4, 6e4])
    for other in (bias, None):
        on_device = None if other is None else other.to(DEVICE)
        found = op.gelu(product.to(DEVICE), on_device, approximate, HALF)
        truth = reference.gelu(product, other, approximate)
        assert torch.allclose(found.cpu().double(), truth, rtol=1e-3, atol=1e-6)


def test_numbers_beyond_float16_become_infinite() -> None:
    """The tower then computes the picture once more in float32."""
    large = torch.full((4, 8), 1e5, device=DEVICE)
    assert op.gelu(large, None, "tanh", HALF).isinf().all()


@pytest.mark.parametrize(("n", "cols"), SIZES)
def test_add_product(n: int, cols: int) -> None:
    x, product, bias = normal(n, cols), normal(n, cols, seed=1), normal(cols, seed=2)
    for other in (bias, None):
        mine = x.clone().to(DEVICE)
        op.add_product(mine, product.to(DEVICE), None if other is None else other.to(DEVICE))
        assert nmse(mine.cpu(), reference.add_product(x, product, other)) < 1e-12


def test_attention_by_warpgroups_is_for_many_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(patches: int, dim: int, dtype: torch.dtype = HALF) -> bool:
        return attention.takes(torch.empty(3, patches, 2, dim, dtype=dtype, device="meta"))

    monkeypatch.setattr(launch, "WARPGROUPS", True)
    assert takes(4096, 72)
    assert takes(16192, 80, torch.bfloat16)
    assert not takes(4095, 72)
    assert not any((takes(4096, 64), takes(4096, 88), takes(4096, 72, torch.float32)))
    monkeypatch.setattr(launch, "WARPGROUPS", False)
    assert not takes(4096, 72)
