"""Paged attention against a float64 softmax, around every border of the kernel, and the same bits however it is cut."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from moeserve.kernels.attention.reference import Sequence
from moeserve.kernels.cpu_stream import AttentionPlan
from moeserve.kernels.quantize.kv import quantize_kv
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import KvLayer
from tests.kernels.attention.attention_step import BORDERS, Step
from tests.kernels.operations import COSTLY_ISAS, ISAS, run_attention, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)
BEST = ISAS[-1]


@lru_cache(maxsize=1)
def at_borders(group: int, kv_heads: int, dim: int, window: int = 0) -> tuple[Step, torch.Tensor]:
    """A step around every border, and its output in float64, which is the same for each instruction set."""
    step = Step(BORDERS, group * kv_heads, kv_heads, dim)
    return step, step.expected(window=window)


@each_vector_isa
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_borders_against_float64(isa: str, group: int, dim: int) -> None:
    step, expected = at_borders(group, 1 if group == 8 else 2, dim)
    for split in (False, True):
        out = step.run(isa, split=split)
        for s in step.sequences:
            rows = slice(s.row, s.row + s.count)
            assert nmse(out[rows], expected[rows]) < 1e-12, (s.position, s.count, split)


@each_isa
@pytest.mark.parametrize("sharpness", [0.0, 30.0, 300.0])
def test_flat_and_sharp_softmax(isa: str, sharpness: float) -> None:
    """All keys equal, and scores so far apart that most weights underflow to exactly 0. A score of 1000 is known to
    6e-5 in float32, and so is its weight."""
    step = Step([(0, 40), (1500, 2), (70, 1)], 4, 2, 64, sharpness=sharpness)
    assert nmse(step.run(isa), step.expected()) < 1e-10


@each_isa
def test_int8_rows_are_those_of_the_float_rows(isa: str) -> None:
    step = Step([(0, 17), (1030, 1)], 4, 2, 96)
    out = run_attention(stream_of(isa), step.q, step.kv, step.sequences)
    assert torch.equal(out.q8, quantize(out.f32).rows())


@each_isa
def test_splitting_and_threads_do_not_change_a_bit(isa: str) -> None:
    step = Step([(0, 40), (1030, 1), (2100, 20), (5, 1)], 8, 2, 64)
    whole = step.run(isa, 1, split=False)
    for threads in (1, 2, 3, 5):
        for split in (False, True, None):
            assert torch.equal(step.run(isa, threads, split=split), whole)


@pytest.mark.parametrize(
    ("spans", "threads", "split", "slices"),
    [
        ([(500, 1)], 2, False, 0),  # two KV heads: enough
        ([(500, 1)], 3, False, 2),
        ([(500, 1)], 64, False, 2),
        ([(3000, 1)], 9, True, 2),  # three segments of each KV head
        ([(2047, 1), (40, 1)], 5, True, 2),  # parts of different lengths
        ([(0, 40)], 16, False, 2),
        ([(1000, 40), (7, 1)], 11, True, 2),
        ([(31, 1)] * 8, 16, False, 0),  # a piece for each thread
        ([(31, 1)] * 9, 16, False, 2),  # or two, for some
        ([(31, 1)] * 11, 16, False, 0),
    ],
)
@pytest.mark.parametrize("window", [0, 700])
def test_few_pieces_are_shared_by_keys_and_columns(
    spans: list[tuple[int, int]], threads: int, split: bool, slices: int, window: int
) -> None:
    """32 heads with two KV heads, gated and with sinks, have the bits that a single thread computes."""
    step = Step(spans, 32, 2, 64)
    plan = AttentionPlan()
    options = {"window": window, "gate": step.q.flatten(1).contiguous(), "sinks": torch.linspace(-1, 3, 32)}
    shared = step.run(BEST, 2, plan=plan, plan_threads=threads, **options)
    assert (plan.split, plan.slices) == (split, slices)
    assert torch.equal(shared, step.run(BEST, 1, split=False, **options))
    assert nmse(shared, step.expected(**options)) < 1e-12


@pytest.mark.parametrize(
    ("span", "threads", "split", "cuts"),
    [
        ((500, 1), 2, False, 1),  # two KV heads: enough
        ((500, 1), 3, False, 2),
        ((500, 1), 64, False, 4),  # parts of four heads
        ((3000, 1), 9, True, 2),  # three segments of each KV head
        ((0, 40), 16, False, 4),
    ],
)
def test_few_pieces_are_cut_by_heads(span: tuple[int, int], threads: int, split: bool, cuts: int) -> None:
    """32 heads with two KV heads over a q8_0 cache have the bits that a single thread computes."""
    step = Step([span], 32, 2, 64)
    (keys, key_scales), (values, value_scales) = quantize_kv(step.kv.keys), quantize_kv(step.kv.values)
    step.kv = KvLayer(keys, values, key_scales, value_scales)
    plan = AttentionPlan()
    cut = step.run(BEST, 2, plan=plan, plan_threads=threads)
    assert (plan.split, plan.cuts) == (split, cuts)
    assert torch.equal(cut, step.run(BEST, 1, split=False))


@pytest.mark.parametrize(
    ("spans", "threads", "split", "together"),
    [
        ([(8200, 1)], 2, True, 4),  # nine segments of each of four KV heads
        ([(4100, 1), (2100, 1)], 3, True, 2),
        ([(4100, 1), (2100, 1)], 5, True, 1),
        ([(40 * i, 1) for i in range(1, 17)], 2, False, 4),  # as many short rows
        ([(40 * i, 1) for i in range(1, 17)], 6, False, 2),
        ([(0, 5)] * 8, 1, False, 2),  # no more queries than a whole tile of one KV head has
        ([(0, 40)] * 8, 1, False, 1),
    ],
)
@pytest.mark.parametrize("window", [0, 1500])
def test_kv_heads_that_are_read_together(
    spans: list[tuple[int, int]], threads: int, split: bool, together: int, window: int
) -> None:
    """Where there are pieces of work enough: with the bits of each KV head by itself."""
    step = Step(spans, 8, 4, 64)
    plan = AttentionPlan()
    joined = step.run(BEST, 2, plan=plan, plan_threads=threads, window=window)
    assert (plan.split, plan.cuts, plan.together) == (split, 1, together)
    apart = AttentionPlan()
    assert torch.equal(joined, step.run(BEST, 1, plan=apart, plan_threads=64, window=window))
    assert apart.together == 1
    assert nmse(joined, step.expected(window=window)) < 1e-12


@each_isa
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_and_the_whole_give_the_same_bits(isa: str, chunk: int) -> None:
    """A prompt of 70 after 1000 cached tokens: at once, in chunks, token by token."""
    step = Step([(1000, 70)], 4, 2, 128)
    whole, slots = step.run(isa), step.sequences[0].slots
    for first in range(0, 70, chunk):
        count = min(chunk, 70 - first)
        part = Sequence(0, count, 1000 + first, slots)
        rows = slice(first, first + count)
        out = run_attention(stream_of(isa), step.q[rows].contiguous(), step.kv, [part])
        assert torch.equal(out.f32, whole[rows])


@each_isa
def test_alone_and_in_a_crowd_the_same_bits(isa: str) -> None:
    step = Step([(0, 20), (40, 1), (1023, 3), (500, 1), (64, 64)], 4, 2, 64)
    crowd = step.run(isa, 3)
    for s in step.sequences:
        rows = slice(s.row, s.row + s.count)
        alone = run_attention(
            stream_of(isa), step.q[rows].contiguous(), step.kv, [Sequence(0, s.count, s.position, s.slots)]
        )
        assert torch.equal(alone.f32, crowd[rows])


WINDOWS = [1, 2, 31, 32, 33, 128, 1000, 1024, 1040, 5000]


@each_vector_isa
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_against_float64(isa: str, window: int) -> None:
    """Windows that end in every place of a block and of a segment, and wider ones than any context."""
    step, expected = at_borders(2, 2, 64, window)
    for split in (False, True):
        out = step.run(isa, split=split, window=window)
        for s in step.sequences:
            rows = slice(s.row, s.row + s.count)
            assert nmse(out[rows], expected[rows]) < 1e-12, (s.position, s.count, split)


@each_isa
def test_a_gate_against_float64(isa: str) -> None:
    step = Step([(0, 20), (1030, 3)], 4, 2, 64)
    gate = torch.randn(len(step.q), 4 * 64, generator=torch.Generator().manual_seed(1)) * 5
    for split in (False, True):
        assert nmse(step.run(isa, split=split, gate=gate), step.expected(gate=gate)) < 1e-12


@each_isa
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("height", [-1000.0, -2.0, 3.0, 50.0])
def test_sinks_against_float64(isa: str, height: float, window: int) -> None:
    """Below every score, among them, and above them all: then little is left of the values, and that is known to 4e-6,
    as a difference of 50 is in float32."""
    step = Step([(0, 20), (1030, 3), (2100, 1)], 8, 2, 64, sharpness=2.0)
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(1)) + height
    expected = step.expected(sinks=sinks, window=window)
    for split in (False, True):
        out = step.run(isa, split=split, sinks=sinks, window=window)
        assert nmse(out, expected) < (1e-10 if height == 50.0 else 1e-12)
    if height == -1000.0:
        assert torch.equal(step.run(isa, sinks=sinks, window=window), step.run(isa, window=window))


@each_isa
def test_a_window_as_wide_as_the_context_changes_no_bit(isa: str) -> None:
    step = Step([(0, 40), (1030, 1), (2100, 20)], 4, 2, 64)
    assert torch.equal(step.run(isa, window=2120), step.run(isa))


@each_isa
@pytest.mark.parametrize("window", [1, 20, 100, 1000, 1100])
def test_windows_and_sinks_in_any_chunks_and_on_any_threads(isa: str, window: int) -> None:
    """A prompt of 70 after 2000 cached tokens: at once, in chunks, token by token; split among threads or not."""
    step, sinks = Step([(2000, 70)], 4, 2, 64), torch.randn(4)
    whole, slots = step.run(isa, 1, split=False, window=window, sinks=sinks), step.sequences[0].slots
    for threads in (2, 3):
        for split in (False, True, None):
            assert torch.equal(step.run(isa, threads, split=split, window=window, sinks=sinks), whole)
    for chunk in (1, 7, 16, 33):
        for first in range(0, 70, chunk):
            count = min(chunk, 70 - first)
            rows, part = slice(first, first + count), Sequence(0, count, 2000 + first, slots)
            out = run_attention(
                stream_of(isa), step.q[rows].contiguous(), step.kv, [part], window=window, sinks=sinks
            )
            assert torch.equal(out.f32, whole[rows])


@each_isa
@pytest.mark.parametrize("split", [False, True])
def test_blocks_before_the_window_are_not_read(isa: str, split: bool) -> None:
    """They may belong to another sequence by then."""
    step = Step([(3000, 20)], 4, 2, 64)
    expected = step.expected(window=50)
    unread = step.sequences[0].slots[: (3000 - 49) // 32 * 32]
    step.kv.keys[unread] = step.kv.values[unread] = float("nan")
    assert nmse(step.run(isa, split=split, window=50), expected) < 1e-12


def test_a_plan_is_rebuilt_in_place() -> None:
    """The worker keeps one plan; a long step's parts must not linger in a short one's."""
    long, short = Step([(3000, 1)], 2, 1, 32), Step([(3, 1)], 2, 1, 32)
    assert nmse(long.run(BEST, split=True), long.expected()) < 1e-12
    assert nmse(short.run(BEST, split=True), short.expected()) < 1e-12
