"""LFM2's short convolution on the CPU beside its float64 reference; nothing around a token changes its bits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.kernels.short_conv.reference import short_conv
from moeserve.kernels.stream_operands import Activations, StateDrafts, StateLayer, StateSequences
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
LFM2 = ShortConvHeads(channels=160, conv_kernel=3)  # two blocks of 64 channels and half of one
LONG = ShortConvHeads(channels=32, conv_kernel=5)
each_form = pytest.mark.parametrize("heads", [LFM2, LONG], ids=["three taps", "five taps"])
BEFORE = 7  # values of other layers in a slot before this one's


def conv_of(h: ShortConvHeads) -> torch.Tensor:
    return torch.randn(h.conv_kernel, h.channels, generator=torch.Generator().manual_seed(99)) * 0.5


def rows_of(h: ShortConvHeads, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, h.row_width, generator=torch.Generator().manual_seed(seed))


def no_state(h: ShortConvHeads) -> torch.Tensor:
    return torch.zeros(h.conv_kernel - 1, h.channels)


class Layer:
    """A layer with its states on the CPU."""

    def __init__(self, stream: CpuStream, heads: ShortConvHeads, slots: int = 4) -> None:
        self.stream = stream
        self.heads = heads
        self.states = torch.full((slots, BEFORE + heads.state_values + 3), 77.0)
        self.copy((-1, 0), (-1, 1), (-1, 2))

    def copy(self, *pairs: tuple[int, int]) -> None:
        self.stream.copy_states(self.states, torch.tensor(pairs, dtype=torch.int32))
        self.stream.wait()

    def step(
        self, parts: Sequence[torch.Tensor], slots: Sequence[int], drafts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Each part's rows as one sequence of the step, its state in its slot; the last of them are drafts."""
        counts = [len(part) for part in parts]
        total = sum(counts)
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        out = Activations(total + 1, self.heads.channels)
        out.f32.fill_(12345.0)
        of_drafts = pending = None
        if drafts is not None:
            self.first = torch.tensor([sum(drafts[:i]) for i in range(len(drafts))], dtype=torch.int32)
            of_drafts = StateDrafts(torch.tensor(drafts, dtype=torch.int32), self.first)
            self.pending = pending = torch.full((sum(drafts), self.heads.pending_values), torch.nan)
        columns = (torch.tensor(x, dtype=torch.int32) for x in (firsts, counts, slots))
        sequences = StateSequences(*columns, of_drafts)
        projected, state = torch.cat(list(parts)), StateLayer(self.states, BEFORE)
        self.stream.short_conv(projected, conv_of(self.heads), state, sequences, total, out, pending)
        self.stream.wait()
        assert (out.f32[total] == 12345.0).all(), "wrote past the end"
        assert torch.equal(out.q8[:total], quantize(out.f32[:total]).rows())
        return list(out.f32[:total].split(counts))

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """After a step with drafts of all these sequences."""
        slot, moved = (torch.tensor(x, dtype=torch.int32) for x in (slots, accepted))
        state = StateLayer(self.states, BEFORE)
        self.stream.commit_states(self.heads, state, slot, self.first, moved, self.pending)
        self.stream.wait()

    def state_of(self, slot: int) -> torch.Tensor:
        own = self.states[slot, BEFORE : BEFORE + self.heads.state_values]
        return own.view(self.heads.conv_kernel - 1, -1)


@each_isa
@each_form
def test_against_float64(isa: str, heads: ShortConvHeads) -> None:
    layer, rows = Layer(stream_of(isa), heads), rows_of(heads, 50)
    (out,) = layer.step([rows], [1])
    expected, state = short_conv(rows, conv_of(heads), no_state(heads))
    assert nmse(out, expected) < 1e-12
    assert nmse(layer.state_of(1), state) < 1e-12
    assert (layer.states[:, :BEFORE] == torch.tensor([0.0, 0.0, 0.0, 77.0])[:, None]).all()
    assert not layer.states[[0, 2]].any(), "wrote into another slot"


@each_isa
@each_form
def test_chunks_neighbours_threads_and_copies_do_not_change_a_bit(isa: str, heads: ShortConvHeads) -> None:
    rows, other = rows_of(heads, 70), rows_of(heads, 70, seed=1)
    (whole,) = Layer(stream_of(isa, 1), heads).step([rows], [0])
    for chunk in (1, 2, 33):
        layer = Layer(stream_of(isa, 3), heads)
        got = []
        for first in range(0, 70, chunk):
            part = slice(first, first + chunk)
            got.append(layer.step([other[part], rows[part]], [2, 0])[1])
            if first == 33:  # a snapshot, and on from it
                layer.copy((0, 3), (2, 0), (3, 0))
        assert torch.equal(torch.cat(got), whole)


@each_isa
@each_form
def test_drafts_move_no_state_until_they_are_accepted(isa: str, heads: ShortConvHeads) -> None:
    """Whatever is drafted and rejected, outputs and states are those of rows without drafts, bit for bit."""
    texts, wrong = [rows_of(heads, 60), rows_of(heads, 60, seed=1)], rows_of(heads, 60, seed=2)
    whole = Layer(stream_of(isa, 1), heads)
    expected = whole.step(texts, [0, 2])
    layer, rng = Layer(stream_of(isa, 3), heads), random.Random(5)
    at, got = 0, list[list[torch.Tensor]](([], []))
    while at < 60:
        moved = min(rng.randint(0, 5), 59 - at)
        rejected = [rng.randint(0, 2), rng.randint(0, 2)]
        rows = [
            torch.cat([text[at : at + 1 + moved], wrong[:more]])
            for text, more in zip(texts, rejected, strict=True)
        ]
        outs = layer.step(rows, [0, 2], [moved + more for more in rejected])
        for parts, out in zip(got, outs, strict=True):
            parts.append(out[: 1 + moved])
        if moved:
            layer.commit([0, 2], [moved, moved])
        at += 1 + moved
    assert all(torch.equal(torch.cat(parts), text) for parts, text in zip(got, expected, strict=True))
    assert torch.equal(layer.states[[0, 2]], whole.states[[0, 2]])


def test_what_does_not_fit_is_refused() -> None:
    layer, rows = Layer(stream_of(ISAS[0]), LFM2), rows_of(LFM2, 4)
    with pytest.raises(IndexError, match="state slot 4"):
        layer.step([rows], [4])
    with pytest.raises(ValueError, match="slot"):
        layer.step([rows, rows], [1, 1])
    with pytest.raises(ValueError, match="projected"):
        layer.step([rows[:, 1:]], [1])
    layer.states = layer.states[:, :-4].contiguous()
    with pytest.raises(ValueError, match="first"):
        layer.step([rows], [1])
