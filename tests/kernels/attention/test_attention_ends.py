"""Attention whose rows see beyond themselves, as a picture's do: around every border, the same bits in all steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.cpu_stream import AttentionPlan
from moeserve.kernels.quantize.kv import dequantize_kv, quantize_kv
from moeserve.kernels.stream_operands import Heads, KvLayer
from tests.kernels.attention.attention_step import Step
from tests.kernels.operations import COSTLY_ISAS, ISAS, run_attention, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)
BEST = ISAS[-1]
# A chunk's position and count, and the position and count of the picture in it.
PICTURES = [
    ((0, 20), (5, 10)),  # within a tile of 16 rows and a block of 32 keys
    ((0, 70), (3, 64)),
    ((1000, 60), (1010, 40)),  # over the border of a segment: some rows see a segment that begins behind them
    ((1000, 60), (1005, 19)),  # up to it
    ((1020, 8), (1020, 8)),
    ((2000, 120), (2001, 100)),
    ((40, 17), (40, 17)),  # a chunk that is a picture, whose first part may be cached
    ((0, 33), (16, 1)),
]


def seeing(step: Step, pictures: list[tuple[int, int] | None]) -> Step:
    """With a picture in each sequence, whose rows see all of it."""
    step.sequences = [
        s if picture is None else Sequence(s.row, s.count, s.position, s.slots, ends_of(s, *picture))
        for s, picture in zip(step.sequences, pictures, strict=True)
    ]
    return step


def ends_of(s: Sequence, start: int, count: int) -> torch.Tensor:
    positions = torch.arange(s.position, s.position + s.count, dtype=torch.int32)
    within = (positions >= start) & (positions < start + count)
    return torch.where(within, start + count, positions + 1)


def all_pictures(heads: int = 4, kv_heads: int = 2, dim: int = 64) -> Step:
    chunks, pictures = zip(*PICTURES, strict=True)
    spans = [*chunks, (70, 1), (0, 40)]
    return seeing(Step(spans, heads, kv_heads, dim), [*pictures, None, None])


@each_vector_isa
@pytest.mark.parametrize("window", [0, 8, 33, 64, 1000])
@pytest.mark.parametrize("split", [False, True, None])
def test_against_float64(isa: str, window: int, split: bool | None) -> None:
    step = all_pictures()
    out, expected = step.run(isa, split=split, window=window), step.expected(window=window)
    for s in step.sequences:
        rows = slice(s.row, s.row + s.count)
        assert nmse(out[rows], expected[rows]) < 1e-12, (s.position, s.count)


@each_isa
def test_pictures_that_see_nothing_more_change_no_bit(isa: str) -> None:
    step = Step([(0, 40), (1030, 1), (2100, 20)], 4, 2, 64)
    causal = step.run(isa)
    seeing(step, [(4, 1), (1030, 1), None])
    assert torch.equal(step.run(isa), causal)


@each_isa
@pytest.mark.parametrize("window", [0, 20])
def test_alone_in_a_crowd_and_on_any_threads(isa: str, window: int) -> None:
    step = all_pictures(8, 2)
    crowd = step.run(isa, 1, split=False, window=window)
    for threads in (2, 3):
        for split in (True, None):
            assert torch.equal(step.run(isa, threads, split=split, window=window), crowd)
    for s in step.sequences:
        rows = slice(s.row, s.row + s.count)
        q, alone = step.q[rows].contiguous(), Sequence(0, s.count, s.position, s.slots, s.ends)
        assert torch.equal(run_attention(stream_of(isa), q, step.kv, [alone], window=window).f32, crowd[rows])


@each_isa
def test_a_chunk_that_begins_within_a_picture(isa: str) -> None:
    """Its rows have the bits that they have where the picture is computed whole."""
    step = seeing(Step([(990, 80)], 4, 2, 64), [(1000, 50)])
    whole, (s,) = step.run(isa, window=30), step.sequences
    assert s.ends is not None
    for first in (10, 11, 27, 42, 59):
        part = Sequence(0, 80 - first, 990 + first, s.slots, s.ends[first:])
        out = run_attention(stream_of(isa), step.q[first:].contiguous(), step.kv, [part], window=30)
        assert torch.equal(out.f32, whole[first:])


@pytest.mark.parametrize("threads", [3, 5, 16])
@pytest.mark.parametrize("chunk", [((500, 12), (502, 9)), ((1015, 20), (1018, 16))])
def test_shared_by_keys_and_columns(chunk: tuple[tuple[int, int], tuple[int, int]], threads: int) -> None:
    """One tile's few pieces of work (attention_sliced.cpp), whole and in segments."""
    step = seeing(Step([chunk[0]], 32, 2, 64), [chunk[1]])
    shared = step.run(BEST, 2, plan_threads=threads, window=300)
    assert torch.equal(shared, step.run(BEST, 1, split=False, window=300))
    assert nmse(shared, step.expected(window=300)) < 1e-12


@each_isa
def test_a_quantised_cache(isa: str) -> None:
    step = all_pictures()
    (k, k_scales), (v, v_scales) = (quantize_kv(each.nan_to_num()) for each in (step.kv.keys, step.kv.values))
    keys, values = dequantize_kv(k, k_scales), dequantize_kv(v, v_scales)
    expected = attention(step.q, keys, values, step.sequences, window=40)
    step.kv = KvLayer(k, v, k_scales, v_scales)
    assert nmse(step.run(isa, window=40), expected) < 1e-8


def test_ends_that_are_refused() -> None:
    """Before the row itself, behind its sequence, and fewer than rows."""
    step = Step([(8, 4)], 4, 2, 64)
    s = step.sequences[0]
    for bad in ([9, 9, 11, 12], [9, 10, 11, 13], [9, 10, 11, 0]):
        step.sequences = [Sequence(s.row, s.count, s.position, s.slots, torch.tensor(bad, dtype=torch.int32))]
        with pytest.raises(IndexError, match="does not see itself, or sees beyond its sequence"):
            step.run(BEST)
    one = np.zeros(1, np.int32)
    columns = (one, one + 4, one, one, np.zeros((1, 16), np.int32), Heads(4, 2, 64), 2)
    with pytest.raises(IndexError, match="row 3 does not see itself"):
        build_attention_plan(AttentionPlan(), *columns, ends=np.array([1, 2, 3], np.int32))
