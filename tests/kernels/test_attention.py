"""Paged attention against a float64 softmax, around every border of the kernel, and the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Sequence as List

import pytest
import torch

from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.cpu_stream import KvLayer
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.operations import ISAS, run_attention, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
BEST = ISAS[-1]

# (position, count): around a block of 32 keys, a tile of 16 rows, a segment of 1024 keys; decode and prefill mixed.
BORDERS = [
    *[(position, 1) for position in (0, 30, 31, 32, 33, 63, 64, 1022, 1023, 1024, 1025, 2047, 2048)],
    *[(0, count) for count in (2, 15, 16, 17, 31, 32, 33, 48)],
    *[(15, 17), (31, 2), (1000, 40), (1008, 16), (1020, 3), (1023, 2), (2040, 33)],
]


class Step:
    """The sequences of a step, their KV scattered over a pool, everything else in it poisoned."""

    def __init__(
        self, spans: List[tuple[int, int]], heads: int, kv_heads: int, dim: int, *, sharpness: float = 1.0
    ) -> None:
        generator = torch.Generator().manual_seed(heads * dim)
        used = sum(position + count for position, count in spans)
        pool = torch.randperm(2 * used, generator=generator)
        self.sequences, row, slot = [], 0, 0
        for position, count in spans:
            self.sequences.append(Sequence(row, count, position, pool[slot : slot + position + count]))
            row, slot = row + count, slot + position + count
        keys, values = (torch.randn(2 * used, kv_heads, dim, generator=generator).half() for _ in range(2))
        keys[pool[used:]] = values[pool[used:]] = float("nan")
        self.kv = KvLayer(keys, values)
        self.q = torch.randn(row, heads, dim, generator=generator) * (sharpness / dim**0.5)

    def expected(self) -> torch.Tensor:
        return attention(self.q, self.kv.keys, self.kv.values, self.sequences)

    def run(self, isa: str, threads: int = 2, *, split: bool | None = None) -> torch.Tensor:
        return run_attention(stream_of(isa, threads), self.q, self.kv, self.sequences, split=split).f32


@each_isa
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_borders_against_float64(isa: str, group: int, dim: int) -> None:
    kv_heads = 1 if group == 8 else 2
    step = Step(BORDERS, group * kv_heads, kv_heads, dim)
    expected = step.expected()
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


def test_a_plan_is_rebuilt_in_place() -> None:
    """The worker keeps one plan; a long step's parts must not linger in a short one's."""
    long, short = Step([(3000, 1)], 2, 1, 32), Step([(3, 1)], 2, 1, 32)
    assert nmse(long.run(BEST, split=True), long.expected()) < 1e-12
    assert nmse(short.run(BEST, split=True), short.expected()) < 1e-12
