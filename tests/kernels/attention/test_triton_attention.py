"""Decode and prefill attention against the reference: scattered slots, ragged lengths, every way of splitting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention, prefill_attention, prefill_tiles
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.rope.op import SectionPositions, rope_store
from moeserve.kernels.rope.reference import rope_store as reference_rope
from tests.kernels.weights import nmse
from tests.support.nightly import nightly_after

GUARD = 12345.0
HEADS = [(8, 1, 128), (4, 2, 32), (3, 1, 48)]


@dataclass
class Pool:
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor  # int32 [requests, length]: every slot in one place at most

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.keys.to(DEVICE), self.values.to(DEVICE), self.table.to(DEVICE)


def make_pool(kv_heads: int, dim: int, requests: int, length: int, seed: int = 0) -> Pool:
    g = torch.Generator().manual_seed(seed)
    slots = requests * length + 5
    keys = torch.randn(slots, kv_heads, dim, generator=g).half() * 2
    values = torch.randn(slots, kv_heads, dim, generator=g).half()
    table = torch.randperm(slots, generator=g)[: requests * length].view(requests, length)
    return Pool(keys, values, table.int())


def queries(n: int, heads: int, dim: int) -> torch.Tensor:
    return (torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(9)) / dim**0.5 * 2).half()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("splits", [1, 4])
def test_decode(heads: int, kv_heads: int, dim: int, splits: int) -> None:
    lengths, requests = [300, 1, 64, 129], [3, 0, 2, 1]
    pool, q = make_pool(kv_heads, dim, 4, 300), queries(5, heads, dim)
    sequences = [
        Sequence(i, 1, n - 1, pool.table[r]) for i, (n, r) in enumerate(zip(lengths, requests, strict=True))
    ]
    expected = attention(q[:4], pool.keys, pool.values, sequences)
    room = DecodeWorkspace(5, heads, kv_heads, dim, DEVICE, splits)
    out = GpuActivations.empty(5, heads * dim, DEVICE, dtype=torch.float32, quantised=dim % 32 == 0)
    assert out.x is not None
    out.x.fill_(GUARD)
    for _ in range(2):  # the counters are as they were
        decode_attention(
            q.flatten(1).to(DEVICE), None, *pool.on_device(), ints([*requests, 0]),
            ints([*(n - 1 for n in lengths), 0]), counter(4),
            room, out.x, out.codes, out.scales,
        )  # fmt: skip
        assert nmse(out.x[:4].cpu(), expected) < 1e-6  # weights of float16
        assert (out.x[4] == GUARD).all()
        assert not room.counters.any()
    if out.codes is not None and out.scales is not None:
        q8 = quantize(out.x[:4].cpu())
        assert (out.codes[:4].cpu().int() - q8.codes).abs().max() <= 1
        assert torch.allclose(out.scales[:4].cpu(), q8.scales, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("splits", "norm_after"), [(1, True), (4, False)])
def test_decode_of_new_tokens(heads: int, kv_heads: int, dim: int, splits: int, norm_after: bool) -> None:
    """The same as norm, rotation and write to the pool first; the row that does not exist writes nothing."""
    lengths, requests, n = [300, 1, 129], [2, 0, 1], 3
    pool = make_pool(kv_heads, dim, 3, 300)
    g = torch.Generator().manual_seed(5)
    fused = torch.randn(n + 1, (heads + 2 * kv_heads) * dim, generator=g)
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    norms = torch.rand(2, dim, generator=g) + 0.5
    angles = torch.rand(300, dim // 2, generator=g) * 6
    positions = torch.tensor(lengths) - 1
    slots = pool.table[torch.tensor(requests), positions]
    q, k, v = (part.unflatten(1, (-1, dim)) for part in fused[:n].split(widths, dim=1))
    keys, values, table = (t.clone() for t in pool.on_device())
    q = reference_rope(
        q, k, v, *norms, 1e-6, angles.cos()[positions], angles.sin()[positions], slots, pool.keys, pool.values,
        norm_after=norm_after,
    )  # fmt: skip
    sequences = [Sequence(i, 1, lengths[i] - 1, pool.table[r]) for i, r in enumerate(requests)]
    expected = attention(q, pool.keys, pool.values, sequences)
    room = DecodeWorkspace(n + 1, heads, kv_heads, dim, DEVICE, splits)
    out = torch.full((n + 1, heads * dim), GUARD, device=DEVICE)
    mine, mine_k, mine_v = fused.to(DEVICE).split(widths, dim=1)
    new = NewTokens(
        mine_k, mine_v, *norms.to(DEVICE), 1e-6, angles.cos().to(DEVICE), angles.sin().to(DEVICE),
        ints([*slots.tolist(), 7]), norm_after=norm_after,
    )  # fmt: skip
    decode_attention(
        mine, new, keys, values, table, ints([*requests, 0]), ints([*positions.tolist(), 5]), counter(n),
        room, out, None, None,
    )  # fmt: skip
    assert nmse(out[:n].cpu(), expected) < 1e-6
    assert (out[n] == GUARD).all()
    assert nmse(keys.cpu(), pool.keys.double()) < 1e-8
    assert torch.equal(values.cpu(), pool.values)


# window, sinks, scale, cap of scores
VARIANTS = [
    (0, True, None, 0.0),
    (20, False, None, 1.5),
    (65, True, 0.3, 0.0),
    (1, False, 1.0, 0.0),
    (1000, True, 0.05, 0.7),
]


def random_sinks(heads: int) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(11)) * 3


@pytest.mark.parametrize(("window", "has_sinks", "scale", "cap"), nightly_after(3, VARIANTS))
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_decode_variants(window: int, has_sinks: bool, scale: float | None, cap: float, splits: int) -> None:
    """Also of new tokens, with a partial rotation and without norms."""
    heads, kv_heads, dim, rotary = 4, 2, 32, 16
    lengths, requests, n = [300, 1, 64, 129], [3, 0, 2, 1], 4
    pool, q = make_pool(kv_heads, dim, 4, 300), queries(n, heads, dim)
    sinks = random_sinks(heads) if has_sinks else None
    options = {"window": window, "score_cap": cap}
    mine = options | {"sinks": None if sinks is None else sinks.to(DEVICE), "scale": scale}
    sequences = [Sequence(i, 1, lengths[i] - 1, pool.table[r]) for i, r in enumerate(requests)]
    positions = torch.tensor(lengths) - 1
    room = DecodeWorkspace(n, heads, kv_heads, dim, DEVICE, splits)
    out = torch.full((n, heads * dim), GUARD, device=DEVICE)
    where = (ints(requests), ints(positions), counter(n))
    decode_attention(
        q.flatten(1).to(DEVICE), None, *pool.on_device(), *where, room, out, None, None, **mine
    )  # fmt: skip
    # What the scale leaves to be done, where q was multiplied by 1/sqrt(dim).
    rest = 1.0 if scale is None else scale * dim**0.5
    expected = attention(q.double() * rest, pool.keys, pool.values, sequences, sinks=sinks, **options)
    assert nmse(out.cpu(), expected) < 1e-6

    g = torch.Generator().manual_seed(5)
    k, v = (torch.randn(n, kv_heads * dim, generator=g) for _ in "kv")
    projected, angles = (
        torch.randn(n, heads * dim, generator=g),
        torch.rand(300, rotary // 2, generator=g) * 6,
    )
    slots = pool.table[torch.tensor(requests), positions]
    keys, values, table = (t.clone() for t in pool.on_device())
    rotated = reference_rope(
        *(t.unflatten(1, (-1, dim)) for t in (projected, k, v)), None, None, 1e-6, angles.cos()[positions],
        angles.sin()[positions], slots, pool.keys, pool.values, scale=scale,
    )  # fmt: skip
    new = NewTokens(
        k.to(DEVICE),
        v.to(DEVICE),
        None,
        None,
        1e-6,
        angles.cos().to(DEVICE),
        angles.sin().to(DEVICE),
        ints(slots),
    )
    decode_attention(projected.to(DEVICE), new, keys, values, table, *where, room, out, None, None, **mine)
    expected = attention(rotated, pool.keys, pool.values, sequences, sinks=sinks, **options)
    assert nmse(out.cpu(), expected) < 1e-6
    assert nmse(keys.cpu(), pool.keys.double()) < 1e-8


def test_a_norm_of_all_heads_is_not_fused() -> None:
    row, pool, room = (
        torch.zeros(1, 64, device=DEVICE),
        make_pool(2, 32, 1, 4),
        DecodeWorkspace(1, 2, 2, 32, DEVICE),
    )
    angles, weight = torch.zeros(4, 16, device=DEVICE), torch.ones(64, device=DEVICE)
    new = NewTokens(row, row, weight, weight, 1e-6, angles, angles, ints([0]))
    with pytest.raises(ValueError, match="rope_store"):
        decode_attention(
            row, new, *pool.on_device(), ints([0]), ints([0]), counter(1), room,
            row.clone(), None, None,
        )  # fmt: skip


def test_a_long_row_is_split_among_short_ones() -> None:
    """The launch is full without: a row of 21 blocks has two parts all the same, one of a block none."""
    heads, kv_heads, dim, lengths = 4, 2, 32, [1300, 40]
    pool, q = make_pool(kv_heads, dim, 2, 1300), queries(2, heads, dim)
    sequences = [Sequence(i, 1, n - 1, pool.table[i]) for i, n in enumerate(lengths)]
    room = DecodeWorkspace(2, heads, kv_heads, dim, DEVICE, 4)
    room.fill = 1  # full without splits
    room.stats.fill_(GUARD)
    out = torch.full((2, heads * dim), GUARD, device=DEVICE)
    decode_attention(
        q.flatten(1).to(DEVICE), None, *pool.on_device(), ints([0, 1]), ints([n - 1 for n in lengths]), counter(2),
        room, out, None, None,
    )  # fmt: skip
    assert nmse(out.cpu(), attention(q, pool.keys, pool.values, sequences)) < 1e-6
    parts = (room.stats[:, 0, :, 0, 0] != GUARD).sum(1)  # of the first head
    assert parts.tolist() == [2, 0]


def test_splits_fill_the_gpu_at_any_batch() -> None:
    assert [DecodeWorkspace(n, 32, 4, 128, "meta").fill for n in (1, 8, 64, 512)] == [64, 16, 2, 1]


def test_a_long_row_has_more_splits_than_fill_the_gpu() -> None:
    assert [DecodeWorkspace(n, 32, 4, 128, "meta").splits for n in (1, 8, 64, 512)] == [64, 16, 16, 16]


CHUNKS = [  # rows, count, position, request
    [(0, 5, 0, 1)],
    [(2, 70, 0, 0), (72, 1, 99, 2), (73, 40, 61, 1)],
    [(0, 17, 128, 2), (17, 64, 64, 0)],
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_prefill(heads: int, kv_heads: int, dim: int, chunks: list[tuple[int, int, int, int]]) -> None:
    n = max(row + count for row, count, _, _ in chunks) + 1
    pool, q = make_pool(kv_heads, dim, 3, 160), queries(n, heads, dim)
    expected = attention(
        q, pool.keys, pool.values, [Sequence(r, c, p, pool.table[s]) for r, c, p, s in chunks]
    )
    columns = [np.array(column, np.int32) for column in zip(*chunks, strict=True)]
    tiles = prefill_tiles(*columns, heads, kv_heads, dim)
    out = torch.full((n, heads * dim), GUARD, device=DEVICE)
    prefill_attention(q.to(DEVICE), *pool.on_device(), torch.from_numpy(tiles).to(DEVICE), out)
    inside = torch.zeros(n, dtype=torch.bool)
    for row, count, _, _ in chunks:
        inside[row : row + count] = True
    assert nmse(out.cpu()[inside], expected[inside]) < 1e-6
    assert (out.cpu()[~inside] == GUARD).all()


@pytest.mark.parametrize(("window", "has_sinks", "scale", "cap"), VARIANTS)
def test_prefill_variants(window: int, has_sinks: bool, scale: float | None, cap: float) -> None:
    heads, kv_heads, dim = 4, 2, 32
    chunks = [(0, 70, 0, 0), (70, 1, 99, 2), (71, 40, 61, 1)]
    n = 111
    pool, q = make_pool(kv_heads, dim, 3, 160), queries(n, heads, dim)
    sinks = random_sinks(heads) if has_sinks else None
    rest = 1.0 if scale is None else scale * dim**0.5
    expected = attention(
        q.double() * rest, pool.keys, pool.values, [Sequence(r, c, p, pool.table[s]) for r, c, p, s in chunks],
        window=window, sinks=sinks, score_cap=cap,
    )  # fmt: skip
    columns = [np.array(column, np.int32) for column in zip(*chunks, strict=True)]
    tiles = torch.from_numpy(prefill_tiles(*columns, heads, kv_heads, dim)).to(DEVICE)
    out = torch.full((n, heads * dim), GUARD, device=DEVICE)
    prefill_attention(
        q.to(DEVICE), *pool.on_device(), tiles, out,
        window=window, sinks=None if sinks is None else sinks.to(DEVICE), scale=scale, score_cap=cap,
    )  # fmt: skip
    assert nmse(out.cpu(), expected) < 1e-6


# a chunk as in CHUNKS, and its picture (position, count), whose rows see all of it
Seeing = tuple[tuple[int, int, int, int], tuple[int, int] | None]
SEEING_AHEAD: list[list[Seeing]] = [
    [((0, 70, 0, 0), (3, 40)), ((70, 1, 99, 2), None), ((71, 40, 61, 1), (80, 21))],
    [((0, 17, 128, 2), (128, 17)), ((17, 64, 64, 0), (64, 1))],
    [((0, 5, 30, 1), (31, 4))],  # fewer rows than a tile
]


def ends_of(count: int, position: int, picture: tuple[int, int] | None) -> torch.Tensor:
    positions = torch.arange(position, position + count, dtype=torch.int32)
    if picture is None:
        return positions + 1
    within = (positions >= picture[0]) & (positions < sum(picture))
    return torch.where(within, sum(picture), positions + 1).int()


def rows_beside_pictures(chunks: list[Seeing]) -> list[int]:
    """Each chunk's first and last row, and of its picture the first and last row with the two beside them and one
    within."""
    rows = []
    for (row, count, position, _), picture in chunks:
        near = {0, count - 1}
        if picture is not None:
            first, last = picture[0] - position, sum(picture) - 1 - position
            near |= {first - 1, first, (first + last) // 2, last, last + 1}
        rows += [row + at for at in sorted(near) if 0 <= at < count]
    return rows


@pytest.mark.parametrize("window", [0, 8, 33, 1000])
@pytest.mark.parametrize("chunks", SEEING_AHEAD)
def test_rows_that_see_ahead(chunks: list[Seeing], window: int) -> None:
    """In tiles and each by itself: over the borders of tiles and blocks of keys."""
    heads, kv_heads, dim = 4, 2, 32
    pool = make_pool(kv_heads, dim, 3, 160)
    sequences = [
        Sequence(row, count, position, pool.table[request], ends_of(count, position, picture))
        for (row, count, position, request), picture in chunks
    ]
    n = max(s.row + s.count for s in sequences)
    q, ends = queries(n, heads, dim), torch.cat([s.ends for s in sequences if s.ends is not None])
    expected = attention(q, pool.keys, pool.values, sequences, window=window)
    columns = [np.array(column, np.int32) for column in zip(*(chunk for chunk, _ in chunks), strict=True)]
    tiles = torch.from_numpy(prefill_tiles(*columns, heads, kv_heads, dim)).to(DEVICE)
    out = torch.full((n, heads * dim), GUARD, device=DEVICE)
    prefill_attention(q.to(DEVICE), *pool.on_device(), tiles, out, window=window, ends=ends.to(DEVICE))
    assert nmse(out.cpu(), expected) < 1e-6

    # A decode step of all rows would take the interpreter most of this module's time.
    rows = rows_beside_pictures(chunks)
    requests = torch.cat([torch.full((count,), request) for (_, count, _, request), _ in chunks])[rows]
    positions = torch.cat([torch.arange(at, at + count) for (_, count, at, _), _ in chunks])[rows]
    room = DecodeWorkspace(len(rows), heads, kv_heads, dim, DEVICE, 4)
    out = torch.full((len(rows), heads * dim), GUARD, device=DEVICE)
    decode_attention(
        q[rows].flatten(1).to(DEVICE), None, *pool.on_device(), ints(requests), ints(positions),
        counter(len(rows)), room, out, None, None,
        window=window, ends=ends[rows].to(DEVICE),
    )  # fmt: skip
    assert nmse(out.cpu(), expected[rows]) < 1e-6


def sectioned(
    angles: torch.Tensor, positions: torch.Tensor, height: int, width: int, time: int
) -> torch.Tensor:
    """The angles of rows with three positions [n, 3]: of each frequency, at its section's position."""
    if time:
        return angles.gather(0, positions[:, [0] * time + [1] * height + [2] * width])
    section = torch.arange(angles.shape[1]) % 3
    for number, count in ((1, height), (2, width)):
        section[3 * count :][section[3 * count :] == number] = 0
    return angles.gather(0, positions[:, section])


@pytest.mark.parametrize(
    ("dim", "rotary", "height", "width", "time"), [(32, 32, 5, 5, 0), (48, 24, 4, 3, 0), (64, 32, 6, 6, 4)]
)
def test_rotation_in_sections(dim: int, rotary: int, height: int, width: int, time: int) -> None:
    """By `rope_store` and within decode attention, as by angles of each row's own."""
    heads, kv_heads, lengths, requests, n = 4, 2, [40, 1, 29], [2, 0, 1], 3
    pool, g = make_pool(kv_heads, dim, 3, 60), torch.Generator().manual_seed(5)
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    projected = torch.randn(n, sum(widths), generator=g)
    norms = torch.rand(2, dim, generator=g) + 0.5
    angles = torch.rand(60, rotary // 2, generator=g) * 6
    rotary_positions = torch.randint(0, 60, (n, 3), generator=g)
    own = sectioned(angles, rotary_positions, height, width, time)
    assert not torch.equal(own, angles[rotary_positions[:, 0]])
    positions = torch.tensor(lengths) - 1
    slots = pool.table[torch.tensor(requests), positions]
    before = pool.on_device()
    q, k, v = (part.unflatten(1, (-1, dim)) for part in projected.split(widths, dim=1))
    q = reference_rope(q, k, v, *norms, 1e-6, own.cos(), own.sin(), slots, pool.keys, pool.values)
    sections = SectionPositions(ints(rotary_positions), height, width, time)
    tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    mine = projected.to(DEVICE).split(widths, dim=1)

    keys, values, table = (t.clone() for t in before)
    rotated = torch.empty(n, heads, dim, dtype=torch.float16, device=DEVICE)
    rope_store(
        *mine, *norms.to(DEVICE), 1e-6, *tables, ints(positions), ints(slots), counter(n), rotated, keys, values,
        sections=sections,
    )  # fmt: skip
    assert nmse(rotated.cpu(), q) < 1e-6
    assert nmse(keys.cpu(), pool.keys.double()) < 1e-6

    keys, values, table = (t.clone() for t in before)
    new = NewTokens(mine[1], mine[2], *norms.to(DEVICE), 1e-6, *tables, ints(slots), sections=sections)
    room = DecodeWorkspace(n, heads, kv_heads, dim, DEVICE, 1)
    out = torch.full((n, heads * dim), GUARD, device=DEVICE)
    decode_attention(
        mine[0], new, keys, values, table, ints(requests), ints(positions), counter(n), room, out, None, None,
    )  # fmt: skip
    sequences = [Sequence(i, 1, lengths[i] - 1, pool.table[r]) for i, r in enumerate(requests)]
    assert nmse(out.cpu(), attention(q, pool.keys, pool.values, sequences)) < 1e-6
    assert nmse(keys.cpu(), pool.keys.double()) < 1e-6


def test_a_sink_is_a_key_of_value_zero() -> None:
    """The reference of what a sink is: one key more whose score is the sink's."""
    q, keys, values = torch.ones(1, 1, 4), torch.eye(4)[:2, None], torch.randn(2, 1, 4)
    sequence = [Sequence(0, 1, 1, torch.tensor([0, 1]))]
    more = Sequence(0, 1, 2, torch.tensor([2, 0, 1]))
    sink_key = torch.tensor([[[0.25, 0.25, 0.25, 1.25]]])  # scores 2.0
    expected = attention(q, torch.cat([keys, sink_key]), torch.cat([values, torch.zeros(1, 1, 4)]), [more])
    assert torch.allclose(attention(q, keys, values, sequence, sinks=torch.tensor([2.0])), expected)
