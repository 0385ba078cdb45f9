"""Latent attention's Triton kernels against their references: scattered slots, ragged lengths, ways of splitting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.attention.op import prefill_tiles
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.latent import op, reference
from moeserve.kernels.latent.op import (
    by_head,
    decode_latent,
    decode_tile,
    decode_workspace,
    latent_store,
    linear_by_head,
    norm_rows,
    padded_width,
    prefill_latent,
)
from moeserve.kernels.planes import repack
from moeserve.kernels.quantize.reference import quantize
from moeserve.quantization import QUANT_TYPES
from tests.kernels.weights import nmse, random_weights

GUARD = 12345.0
RANK, ROTARY = 64, 32
HEADS = [1, 6, 20, 40]  # of which a decode program takes 16, or 64


class Pool:
    def __init__(self, requests: int, length: int, rotary: int = ROTARY) -> None:
        g = torch.Generator().manual_seed(0)
        slots = requests * length + 5
        self.keys = torch.randn(slots, 1, RANK + rotary, generator=g).half()
        self.table = torch.randperm(slots, generator=g)[: requests * length].view(requests, length).int()

    def attend(self, q: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        return attention(q, self.keys, self.keys[..., :RANK], sequences).view(len(q), -1, RANK)


def queries(n: int, heads: int, rotary: int = ROTARY) -> torch.Tensor:
    g = torch.Generator().manual_seed(9)
    return (torch.randn(n, heads, RANK + rotary, generator=g) / (RANK + rotary) ** 0.5 * 2).half()


def parts(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q[..., :RANK].contiguous().to(DEVICE), q[..., RANK:].contiguous().to(DEVICE)


@pytest.mark.parametrize(
    ("heads", "splits", "rotary"),
    [*((heads, splits, ROTARY) for heads in HEADS for splits in (1, 4, 64)), (6, 4, 0)],
)
def test_decode(heads: int, splits: int, rotary: int) -> None:
    lengths, requests = [150, 1, 33, 64], [3, 0, 2, 1]
    pool, q = Pool(4, 150, rotary), queries(5, heads, rotary)
    sequences = [
        Sequence(i, 1, n - 1, pool.table[r]) for i, (n, r) in enumerate(zip(lengths, requests, strict=True))
    ]
    expected = pool.attend(q[:4], sequences)
    room = decode_workspace(5, heads, RANK, rotary, DEVICE, splits)
    out = torch.full((5, heads, RANK), GUARD, device=DEVICE)
    decode_latent(
        *parts(q), pool.keys.to(DEVICE), pool.table.to(DEVICE), ints([*requests, 0]),
        ints([*(n - 1 for n in lengths), 0]), counter(4), room, out,
    )  # fmt: skip
    assert nmse(out[:4].cpu(), expected) < 1e-6  # weights of float16
    assert (out[4] == GUARD).all()


@pytest.mark.parametrize("splits", [1, None], ids=["without splits", "splits"])
@pytest.mark.parametrize("rows", [1, 4])
def test_decode_to_chosen_keys(rows: int, splits: int | None) -> None:
    """Few rows take another tile than the workspace, more rows the same one; rows have unequal numbers of keys."""
    heads, most, lengths = 40, 150, [150, 1, 65, 64][:rows]
    pool, q = Pool(4, most, ROTARY), queries(rows, heads)
    sequences = [Sequence(i, 1, n - 1, pool.table[i]) for i, n in enumerate(lengths)]
    room, out = (
        decode_workspace(rows, heads, RANK, ROTARY, DEVICE, splits),
        torch.full((rows, heads, RANK), GUARD, device=DEVICE),
    )
    width = padded_width(RANK, ROTARY)
    assert (decode_tile(heads, width, rows) == decode_tile(heads, width)) == (rows > 2)
    decode_latent(
        *parts(q), pool.keys.to(DEVICE), pool.table.to(DEVICE), ints(range(rows)), ints([n - 1 for n in lengths]),
        counter(rows), room, out, chosen=most,
    )  # fmt: skip
    assert nmse(out.cpu(), pool.attend(q, sequences)) < 1e-6


def test_tiles_fit_in_a_hopper_gpus_shared_memory() -> None:
    """Keys wider than DeepSeek's too. With fewer stages some kernels would fit as well, but load no block ahead."""
    assert decode_tile(64, padded_width(512, 64)) == op.WIDE_TILE
    assert decode_tile(64, padded_width(512, 0)) == op.WIDE_TILE
    assert decode_tile(16, padded_width(512, 64)) == op.TILE
    assert decode_tile(64, padded_width(512, 128)) == op.TILE
    for heads in (16, 64):
        assert decode_tile(heads, padded_width(1024, 64)) == op.SMALL_TILE


@pytest.mark.parametrize(
    ("heads", "rotary"), [(6, ROTARY), (6, 0), pytest.param(150, ROTARY, marks=pytest.mark.slow)]
)
def test_prefill(heads: int, rotary: int) -> None:
    """150 heads are more than a tile's rows."""
    chunks = [(1, 40, 0, 0), (41, 1, 70, 2), (42, 20, 61, 1)]
    pool, q = Pool(3, 90, rotary), queries(62, heads, rotary)
    sequences = [Sequence(row, count, position, pool.table[r]) for row, count, position, r in chunks]
    columns = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    tiles = torch.from_numpy(prefill_tiles(*columns, heads, 1, RANK + rotary)).to(DEVICE)
    out = torch.full((62, heads, RANK), GUARD, device=DEVICE)
    prefill_latent(*parts(q), pool.keys.to(DEVICE), pool.table.to(DEVICE), tiles, out)
    assert nmse(out[1:].cpu(), pool.attend(q, sequences)[1:]) < 1e-6
    assert (out[0] == GUARD).all()


@pytest.mark.parametrize("rotary", [ROTARY, 0])
def test_what_is_stored_and_what_becomes_of_q(rotary: int) -> None:
    n, heads, nope, eps, scale, existing = 4, 3, 48, 1e-6, 0.3, 3
    g = torch.Generator().manual_seed(1)
    fused = torch.randn(n, heads * (nope + rotary) + RANK + rotary, generator=g) * 2
    q, latent = fused.to(DEVICE).split([heads * (nope + rotary), RANK + rotary], dim=1)
    norm, angles = torch.rand(RANK, generator=g), torch.randn(50, rotary // 2, generator=g)
    positions, slots = torch.tensor([40, 0, 7, 1]), torch.tensor([7, -1, 2, 3])
    keys = torch.full((9, 1, RANK + rotary), 5.0).half().to(DEVICE)
    mine = torch.full((n, heads, nope), GUARD, device=DEVICE)
    rotated = torch.full((n, heads, rotary), GUARD, device=DEVICE)
    latent_store(
        q, latent, norm.to(DEVICE), eps, angles.cos().to(DEVICE), angles.sin().to(DEVICE), ints(positions),
        ints(slots), counter(existing), scale, mine, rotated, keys,
    )  # fmt: skip
    expected = torch.full((9, 1, RANK + rotary), 5.0, dtype=torch.float64)
    cos, sin = angles.cos()[positions], angles.sin()[positions]
    own, turned = reference.latent_store(
        q.cpu().view(n, heads, -1), latent.cpu(), norm, eps, cos, sin, slots % 9, expected, scale
    )
    assert nmse(mine[:existing].cpu(), own[:existing]) < 1e-12
    assert nmse(rotated[:existing].cpu(), turned[:existing]) < 1e-12 or not rotary
    assert (mine[existing:] == GUARD).all()
    for slot in (7, 2):
        torch.testing.assert_close(keys[slot].cpu().double(), expected[slot], rtol=1e-3, atol=1e-4)
    assert (keys[[0, 1, 3, 4, 5, 6, 8]] == 5.0).all()


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q5_0])
@pytest.mark.parametrize("n", [2, 20])
def test_products_by_head(n: int, kind: Type) -> None:
    heads, rows, cols = 3, 64, 96
    w = random_weights(kind, heads, rows, cols)
    planes = repack(torch.from_numpy(w.rows).to(DEVICE), QUANT_TYPES[int(kind)], (heads, rows, cols))
    x = torch.randn(n, heads, cols, generator=torch.Generator().manual_seed(n))
    out = torch.full((n * heads, rows), GUARD, device=DEVICE)
    blocks = by_head(n, heads, DEVICE)
    linear_by_head(
        x.flatten(0, 1).to(DEVICE), [planes.codes, planes.scales, planes.supers], int(kind), cols, blocks, counter(n),
        out,
    )  # fmt: skip
    expected = reference.linear_by_head(x, w.values())
    assert nmse(out.cpu().view(n, heads, rows), expected) < 1e-5


@pytest.mark.parametrize("has_norm", [False, True])
def test_norm_of_rows_and_their_codes(has_norm: bool) -> None:
    n, parts_, dim, eps = 3, 2, 96, 1e-6
    wide = torch.randn(n, parts_ * dim + 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = wide[:, : parts_ * dim]
    weight = torch.rand(dim) if has_norm else None
    y, codes = (
        torch.full((n, parts_ * dim), GUARD, device=DEVICE),
        torch.zeros(n, parts_ * dim, dtype=torch.int8),
    )
    scales = torch.zeros(n, parts_ * dim // 32, device=DEVICE)
    codes = codes.to(DEVICE)
    norm_rows(
        x, None if weight is None else weight.to(DEVICE), eps, counter(2), y, codes, scales, parts=parts_
    )
    expected = x.cpu().double().view(n, parts_, dim)
    if weight is not None:
        expected = expected / (expected.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    assert nmse(y[:2].cpu(), expected.flatten(1)[:2]) < 1e-12
    assert (y[2] == GUARD).all()
    assert (codes[:2].cpu().int() - quantize(y[:2].cpu()).codes).abs().max() <= 1
