"""Compressed attention's kernels in Triton, beside their specification."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.compressed import reference
from moeserve.kernels.compressed.op import (
    WindowKeys,
    compress,
    compressed_attention,
    compressed_store,
    keep_keys,
)
from moeserve.kernels.compressed_operations import CompressorParameters, RowAngles
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.stream_operands import KeyRings, KvLayer
from tests.kernels.weights import nmse

DIM, ROTARY, EPS, LENGTH, WINDOW, HEADS = 96, 24, 1e-6, 40, 7, 5
STATE_SLOTS = (2, 1)  # of two sequences
RINGS = KeyRings(first=2 * LENGTH, rows=WINDOW + 5, num=3)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def tables() -> reference.Angles:
    turns = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(ROTARY // 2) / (ROTARY // 2))
    return reference.Angles(turns.cos(), turns.sin())


class Step:
    """Rows of two sequences, then a row and a sequence of padding."""

    def __init__(self, *ranges: range) -> None:
        """ranges: the sequences' positions."""
        self.ranges = ranges
        a, b = map(len, ranges)
        self.sequences = StepSequences(
            ints([0, a, 0]), ints([a, b, 0]), ints([*STATE_SLOTS, 0]), ints([0] * a + [1] * b + [2])
        )
        self.count, self.positions = counter(a + b), ints([*ranges[0], *ranges[1], 0])
        self.angles = RowAngles(*map(on_device, tables()), self.positions)

    def take(self, of_sequences: torch.Tensor) -> torch.Tensor:
        """The rows' of [2, LENGTH, ...]; the padding's are zeros."""
        parts = [of_sequences[i, list(positions)] for i, positions in enumerate(self.ranges)]
        return on_device(torch.cat([*parts, torch.zeros_like(of_sequences[0, :1])]))


def steps(count: int) -> list[Step]:
    """Steps of `count` tokens of one sequence, and of one more of the other."""
    numbers = range(LENGTH // (count + 1))
    return [
        Step(range(i * (count + 1), (i + 1) * (count + 1)), range(i * count, (i + 1) * count))
        for i in numbers
    ]


@pytest.mark.parametrize(
    ("ratio", "overlaps", "count"),
    [(4, True, 1), (4, True, 6), (4, True, 19), (16, False, 3), (16, False, 19), (5, True, 3)],
)
def test_entries_are_the_specifications_however_a_prompt_is_cut(
    ratio: int, overlaps: bool, count: int
) -> None:
    width = 2 * DIM if overlaps else DIM
    kv, gate = torch.randn(2, LENGTH, width), 3 * torch.randn(2, LENGTH, width)
    w = CompressorParameters(torch.randn(ratio, width), torch.rand(DIM) + 0.5)
    states = torch.zeros(3, 8 + 3 * width, device=DEVICE)
    states[0] = torch.nan  # the padding's
    entries = torch.zeros(2 * LENGTH, 1, DIM, dtype=torch.float16, device=DEVICE)
    slots = torch.randperm(2 * LENGTH).int().view(2, LENGTH)
    for step in steps(count):
        products = step.take(torch.cat([kv, gate], dim=2))
        compress(
            products[:, :width], products[:, width:].clone(), CompressorParameters(*map(on_device, w)), EPS,
            step.angles, step.sequences, states[:, 8:], step.take(slots), step.count, entries,
        )  # fmt: skip
    written = 0
    for i, positions in enumerate(step.ranges):
        end = positions.stop
        expected = reference.compress(kv[i, :end], gate[i, :end], *w, EPS, tables())
        mine = entries[slots[i, ratio - 1 : end : ratio].long(), 0].cpu()
        assert len(mine) == len(expected) > 0
        assert nmse(mine, expected) < 1e-6
        written += len(mine)
    assert int(entries.any(dim=2).sum()) == written
    assert states[0].isnan().all()
    assert not states[1:, :8].any()


def test_queries_and_keys_are_stored_as_specified() -> None:
    step, index_heads, index_dim = Step(range(3, 8), range(20, 32)), 3, 64
    q, kv, norm = (
        torch.randn(2, LENGTH, HEADS * DIM + index_heads * index_dim),
        torch.randn(2, LENGTH, DIM),
        torch.rand(DIM) + 0.5,
    )
    keys = torch.zeros(RINGS.end + 17, 1, DIM, dtype=torch.float16, device=DEVICE)
    rows, of_window = step.take(q), WindowKeys.of(KvLayer(keys, keys, rings=RINGS), WINDOW)
    n = len(rows)
    queries = torch.zeros(n, HEADS, DIM, dtype=torch.float16, device=DEVICE)
    index_queries = torch.zeros(n, index_heads, index_dim, dtype=torch.float16, device=DEVICE)
    compressed_store(
        rows[:, : HEADS * DIM], step.take(kv), on_device(norm), EPS, 0.25, step.angles, step.sequences, of_window,
        step.count, queries, rows[:, HEADS * DIM :], index_queries,
    )  # fmt: skip
    live, at = n - 1, step.positions[:-1].long().cpu()
    cos, sin = (table[at] for table in tables())
    of_q, of_index = rows[:live].cpu().split([HEADS * DIM, index_heads * index_dim], dim=1)
    assert (
        nmse(queries[:live].cpu(), reference.queries(of_q.view(live, HEADS, DIM), EPS, 0.25, cos, sin)) < 1e-6
    )
    turned = reference.rotate_tail(of_index.view(live, index_heads, index_dim), cos, sin)
    assert nmse(index_queries[:live].cpu(), turned) < 1e-6
    assert not queries[live:].any()
    # Five tokens fit the first one's ring, twelve do not.
    places = [RINGS.first + 2 * RINGS.rows + p % RINGS.rows for p in range(3, 8)]
    places += [RINGS.end + row for row in range(5, live)]
    expected = reference.keys(step.take(kv)[:live].cpu(), norm, EPS, cos, sin)
    assert nmse(keys[places, 0].cpu(), expected) < 1e-6
    assert int(keys.any(dim=2).sum()) == live


@pytest.mark.parametrize(
    ("ratio", "top", "count"), [(0, 0, 19), (16, 0, 4), (4, 3, 1), (4, 3, 6), (4, 3, 19)]
)
def test_rows_attend_to_their_window_and_to_entries(ratio: int, top: int, count: int) -> None:
    q, key = torch.randn(2, LENGTH, HEADS, DIM).half(), torch.randn(2, LENGTH, DIM).half()
    keys = torch.randn(RINGS.end + 2 * count + 2, 1, DIM).half()
    entries, keys, sinks = keys[: RINGS.first, 0].clone(), on_device(keys), torch.randn(HEADS)
    slots = torch.randperm(2 * LENGTH).int().view(2, LENGTH)
    lists = torch.stack(
        [torch.randperm(LENGTH // 4)[: top + 1].sort().values.int() for _ in range(2 * LENGTH)]
    )
    lists = lists.view(2, LENGTH, 1, top + 1)
    of_window = WindowKeys.of(KvLayer(keys, keys, rings=RINGS), WINDOW)
    for step in steps(count):
        s, rows = step.sequences, step.take(q)
        for i, (first, n, slot) in enumerate(zip(s.first[:2], s.count[:2], STATE_SLOTS, strict=True)):
            for t, position in enumerate(step.ranges[i]):
                fits = n <= of_window.most_fitting
                in_ring = RINGS.first + slot * RINGS.rows + position % RINGS.rows
                keys[in_ring if fits else RINGS.end + first + t, 0] = on_device(key[i, position])
        chosen = step.take(lists)
        for row, position in enumerate(step.positions.tolist()):
            if (position + 1) // max(ratio, 1) <= top:  # all, as the indexer has it
                chosen[row, 0, :top] = ints(range(top))
        out = torch.full((len(rows), HEADS * DIM), 7.0, device=DEVICE)
        compressed_attention(
            rows, of_window, on_device(sinks), step.angles, s, on_device(slots), ints([*s.row_sequence[:-1], 0]), ratio,
            chosen if top else None, top, step.count, out,
        )  # fmt: skip
        keep_keys(of_window, step.positions, s)
        assert (out[-1] == 7.0).all(), "a row beyond the count changed"
        for row, position in enumerate(step.positions.tolist()[:-1]):
            i = int(s.row_sequence[row])
            attended = key[i, max(0, position - WINDOW + 1) : position + 1]
            if ratio:
                complete = torch.arange((position + 1) // ratio)
                taken = complete if not top or len(complete) <= top else chosen[row, 0, :top].cpu().long()
                attended = torch.cat([entries[slots[i, (taken + 1) * ratio - 1].long()], attended])
            cos, sin = (table[[position]] for table in tables())
            expected = reference.rotate_back(
                reference.attend(q[i, position], attended, sinks)[None], cos, sin
            )
            assert nmse(out[row].cpu().view(1, HEADS, DIM), expected) < 1e-6
