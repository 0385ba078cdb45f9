"""Attention over KV caches of 8 bits, and of bfloat16, in Triton: what is stored, and what is read of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention, prefill_attention, prefill_tiles
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.quantize.kv import dequantize_kv, quantize_kv, quantize_kv_fp8
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.rope.reference import rope_store as rope_reference
from moeserve.kernels.stream_operands import KvLayer
from tests.kernels.weights import nmse
from tests.support.nightly import nightly_after

GUARD = 12345.0
HEADS = [(8, 1, 128), (4, 2, 32), (3, 1, 96)]
LENGTHS, REQUESTS = [300, 1, 64, 129], [3, 0, 2, 1]


QUANTIZERS = {"q8_0": quantize_kv, "fp8": quantize_kv_fp8}
each_type = pytest.mark.parametrize("kind", QUANTIZERS)


class Pool:
    """KV of some requests in scattered slots, quantised; `kv` on the device."""

    def __init__(self, kind: str, kv_heads: int, dim: int, requests: int = 4, length: int = 300) -> None:
        g = torch.Generator().manual_seed(0)
        slots = requests * length + 5
        keys, values = (QUANTIZERS[kind](torch.randn(slots, kv_heads, dim, generator=g) * 2) for _ in "kv")
        self.keys, self.values = dequantize_kv(*keys), dequantize_kv(*values)
        order = torch.randperm(slots, generator=g)[: requests * length]
        self.table = order.view(requests, length).int()
        self.kv = KvLayer(*(t.to(DEVICE) for t in (keys[0], values[0], keys[1], values[1])))

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"key_scales": self.kv.key_scales, "value_scales": self.kv.value_scales}

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these slots, as they are on the device now."""
        assert self.kv.key_scales is not None
        assert self.kv.value_scales is not None
        return (
            dequantize_kv(self.kv.keys.cpu()[rows], self.kv.key_scales.cpu()[rows]),
            dequantize_kv(self.kv.values.cpu()[rows], self.kv.value_scales.cpu()[rows]),
        )


def decode_sequences(pool: Pool) -> list[Sequence]:
    rows = enumerate(zip(LENGTHS, REQUESTS, strict=True))
    return [Sequence(i, 1, n - 1, pool.table[r]) for i, (n, r) in rows]


def queries(n: int, heads: int, dim: int) -> torch.Tensor:
    return (torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(9)) / dim**0.5 * 2).half()


def run_decode(
    pool: Pool, q: torch.Tensor, new: NewTokens | None, heads: int, splits: int, window: int = 0
) -> torch.Tensor:
    kv_heads, dim = pool.keys.shape[1:]
    room = DecodeWorkspace(len(LENGTHS), heads, kv_heads, dim, DEVICE, splits)
    out = torch.full((len(LENGTHS), heads * dim), GUARD, device=DEVICE)
    decode_attention(
        q.to(DEVICE), new, pool.kv.keys, pool.kv.values, pool.table.to(DEVICE), ints(REQUESTS),
        ints([n - 1 for n in LENGTHS]), counter(len(LENGTHS)), room, out, None, None, window=window, **pool.scales,
    )  # fmt: skip
    return out.cpu()


@each_type
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("splits", "window"), nightly_after(1, [(4, 65), (1, 0), (4, 0)]))
def test_decode(kind: str, heads: int, kv_heads: int, dim: int, splits: int, window: int) -> None:
    pool, q = Pool(kind, kv_heads, dim), queries(len(LENGTHS), heads, dim)
    expected = attention(q, pool.keys, pool.values, decode_sequences(pool), window=window)
    # Keys, values and weights of float16.
    assert nmse(run_decode(pool, q.flatten(1), None, heads, splits, window), expected) < 1e-6


def differ_by_a_code(stored: torch.Tensor, exact: torch.Tensor, kind: str) -> bool:
    """At most in a few places: float32 of two kernels rounds differently, and with it a code."""
    numbers, scales = QUANTIZERS[kind](exact)
    expected, scales = dequantize_kv(numbers, scales), scales.double()
    apart = (stored - expected).abs() / scales.repeat_interleave(exact.shape[-1] // scales.shape[-1], dim=-1)
    # A code of q8_0 is 1, and 127 units of a scale's last bit are 0.13; e4m3's is an eighth of its power of two.
    code, rest = torch.tensor(1.0), torch.tensor(0.13)
    if kind == "fp8":
        code, rest = (
            torch.maximum(numbers.double().abs() / 8, torch.tensor(2.0**-6)),
            numbers.double().abs() / 1024,
        )
    return bool((apart <= code + rest).all() and (apart > rest + 0.07 * code).double().mean() < 0.01)


@each_type
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), nightly_after(1, HEADS))
def test_decode_of_new_tokens(kind: str, heads: int, kv_heads: int, dim: int) -> None:
    pool, n, g = Pool(kind, kv_heads, dim), len(LENGTHS), torch.Generator().manual_seed(5)
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    projected = torch.randn(n, sum(widths), generator=g)
    norms, angles = torch.rand(2, dim, generator=g) + 0.5, torch.rand(300, dim // 2, generator=g) * 6
    positions = torch.tensor(LENGTHS) - 1
    slots = pool.table[torch.tensor(REQUESTS), positions].long()
    mine, mine_k, mine_v = projected.to(DEVICE).split(widths, dim=1)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    new = NewTokens(mine_k, mine_v, *norms.to(DEVICE), 1e-6, cos, sin, ints(slots))
    out = run_decode(pool, mine, new, heads, 4)

    q, k, v = (part.unflatten(1, (-1, dim)) for part in projected.split(widths, dim=1))
    exact_k, exact_v = torch.zeros_like(pool.keys), torch.zeros_like(pool.values)
    rotated = rope_reference(
        q, k, v, *norms, 1e-6, angles.cos()[positions], angles.sin()[positions], slots, exact_k, exact_v
    )  # fmt: skip
    for exact, stored in zip((exact_k[slots], exact_v[slots]), pool.stored(slots), strict=True):
        assert differ_by_a_code(stored, exact, kind)
    pool.keys[slots], pool.values[slots] = pool.stored(slots)
    assert nmse(out, attention(rotated, pool.keys, pool.values, decode_sequences(pool))) < 1e-6


CHUNKS = [(0, 70, 0, 0), (70, 1, 99, 2), (71, 40, 61, 1)]  # row, count, position, request


@each_type
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("window", nightly_after(1, [20, 0]))
def test_prefill(kind: str, heads: int, kv_heads: int, dim: int, window: int) -> None:
    n = 111
    pool, q = Pool(kind, kv_heads, dim, 3, 160), queries(n, heads, dim)
    sequences = [Sequence(r, c, p, pool.table[s]) for r, c, p, s in CHUNKS]
    expected = attention(q, pool.keys, pool.values, sequences, window=window)
    columns = [np.array(column, np.int32) for column in zip(*CHUNKS, strict=True)]
    tiles = torch.from_numpy(prefill_tiles(*columns, heads, kv_heads, dim)).to(DEVICE)
    out = torch.full((n, heads * dim), GUARD, device=DEVICE)
    prefill_attention(
        q.to(DEVICE), pool.kv.keys, pool.kv.values, pool.table.to(DEVICE), tiles, out, window=window, **pool.scales
    )  # fmt: skip
    assert nmse(out.cpu(), expected) < 1e-6


@each_type
def test_rope_store(kind: str) -> None:
    """And nothing is stored of a row without a slot."""
    heads, kv_heads, dim, n = 4, 2, 64, 3
    pool, g = Pool(kind, kv_heads, dim), torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, count * dim, generator=g) for count in (heads, kv_heads, kv_heads))
    angles, positions = torch.rand(20, dim // 2, generator=g) * 6, torch.tensor([19, 0, 7])
    before = pool.stored(torch.arange(len(pool.keys)))
    rope_store(
        q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), None, None, 1e-6, angles.cos().to(DEVICE), angles.sin().to(DEVICE),
        ints(positions), ints([10, 2, -1]), counter(n), torch.empty(n, heads, dim, device=DEVICE), pool.kv.keys,
        pool.kv.values, **pool.scales,
    )  # fmt: skip
    slots = torch.tensor([10, 2])
    parts = (part[:2].unflatten(1, (-1, dim)) for part in (q, k, v))
    of_rows = angles.cos()[positions[:2]], angles.sin()[positions[:2]]
    exact_k, exact_v = torch.zeros_like(pool.keys), torch.zeros_like(pool.values)
    rope_reference(*parts, None, None, 1e-6, *of_rows, slots, exact_k, exact_v)
    untouched = torch.ones(len(pool.keys), dtype=torch.bool)
    untouched[slots] = False
    after = pool.stored(torch.arange(len(pool.keys)))
    for exact, now, then in zip((exact_k, exact_v), after, before, strict=True):
        assert differ_by_a_code(now[slots], exact[slots], kind)
        assert torch.equal(now[untouched], then[untouched])


@each_type
def test_what_is_not_finite_stays_visible(kind: str) -> None:
    pool = Pool(kind, 1, 32)
    rows = torch.ones(2, 32, device=DEVICE)
    rows[0, 3], rows[1, 7] = float("nan"), float("inf")
    angle = torch.zeros(1, 16, device=DEVICE)
    rope_store(
        rows.clone(), rows, rows, None, None, 1e-6, angle + 1, angle, ints([0, 0]), ints([4, 5]), counter(2),
        torch.empty(2, 1, 32, device=DEVICE), pool.kv.keys, pool.kv.values, **pool.scales,
    )  # fmt: skip
    for kept in pool.stored(torch.tensor([4, 5])):
        assert not kept.isfinite().any()
