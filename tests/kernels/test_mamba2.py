"""Mamba-2 on the CPU beside its float64 reference, and that nothing around a token changes its bits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.mamba2.reference import Mamba2State, Mamba2Weights, mamba2
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import Activations, StateDrafts, StateLayer, StateSequences
from moeserve.models.loading.mamba2 import mamba2_parameters
from moeserve.models.sources.gguf import names as n
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
EPS = 1e-5
GROUPED = Mamba2Heads(num_heads=6, num_groups=2, head_dim=64, state_dim=96, conv_kernel=4)
ALONE = Mamba2Heads(num_heads=3, num_groups=1, head_dim=32, state_dim=32, conv_kernel=2)
each_form = pytest.mark.parametrize("heads", [GROUPED, ALONE], ids=["groups", "one group"])
BEFORE = 7  # values of other layers in a slot before this one's


def weights_of(h: Mamba2Heads) -> Mamba2Weights:
    torch.manual_seed(99)
    rate = -torch.empty(h.num_heads).uniform_(-4.0, 1.5).exp()
    conv, conv_bias = torch.randn(h.conv_kernel, h.channels) * 0.5, torch.randn(h.channels) * 0.3
    skip = torch.randn(h.num_heads) * 0.3 + 1.0
    return Mamba2Weights(
        conv, conv_bias, rate, torch.randn(h.num_heads) - 1.0, skip, torch.rand(h.value_width) + 0.5
    )


def rows_of(h: Mamba2Heads, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, h.row_width, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A layer with its states on the CPU."""

    def __init__(self, stream: CpuStream, heads: Mamba2Heads, slots: int = 4) -> None:
        self.stream = stream
        self.heads = heads
        w = weights_of(heads)
        names = (n.SSM_A, n.bias_of_part(n.SSM_DT), n.SSM_D, n.of_part(n.SSM_NORM))
        file = {n.of_part(n.SSM_CONV1D): w.conv.t(), n.bias_of_part(n.SSM_CONV1D): w.conv_bias}
        file |= dict(zip(names, w[2:], strict=True))
        self.w = mamba2_parameters(heads, lambda name: file[name].contiguous(), as_attention=True)
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
        out, h = Activations(total + 1, self.heads.value_width), self.heads
        out.f32.fill_(12345.0)
        of_drafts = pending = None
        if drafts is not None:
            self.first = torch.tensor([sum(drafts[:i]) for i in range(len(drafts))], dtype=torch.int32)
            of_drafts = StateDrafts(torch.tensor(drafts, dtype=torch.int32), self.first)
            self.pending = pending = torch.full((sum(drafts), h.pending_values), torch.nan)
        columns = (torch.tensor(x, dtype=torch.int32) for x in (firsts, counts, slots))
        self.stream.mamba2(
            torch.cat(list(parts)), torch.empty(total, h.num_heads), self.w, EPS, h,
            StateLayer(self.states, BEFORE), StateSequences(*columns, of_drafts), total, out, pending,
        )  # fmt: skip
        self.stream.wait()
        assert (out.f32[total] == 12345.0).all(), "wrote past the end"
        sound = out.f32[:total].isfinite().all(dim=1)
        assert torch.equal(out.q8[:total][sound], quantize(out.f32[:total]).rows()[sound])
        return list(out.f32[:total].split(counts))

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """After a step with drafts of all these sequences."""
        slot, moved = (torch.tensor(x, dtype=torch.int32) for x in (slots, accepted))
        self.stream.commit_states(
            self.heads, StateLayer(self.states, BEFORE), slot, self.first, moved, self.pending
        )
        self.stream.wait()

    def state_of(self, slot: int) -> Mamba2State:
        """As the reference has it: the columns' blocks side by side, the channels in the order x, B, C."""
        h = self.heads
        of_heads, conv = self.states[slot, BEFORE : BEFORE + h.state_values].split(
            [h.delta_values, h.state_values - h.delta_values]
        )
        c, b, x = conv.view(-1, h.channels).split([h.key_width, h.key_width, h.value_width], dim=1)
        blocks = of_heads.view(h.num_heads, -1, h.state_dim, 32)
        return Mamba2State(blocks.transpose(1, 2).flatten(2), torch.cat([x, b, c], dim=1))


@each_isa
@each_form
def test_against_float64(isa: str, heads: Mamba2Heads) -> None:
    layer, rows = Layer(stream_of(isa), heads), rows_of(heads, 150)
    (out,) = layer.step([rows], [1])
    expected, state = mamba2(rows, weights_of(heads), EPS, heads, Mamba2State.empty(heads))
    assert nmse(out, expected) < 1e-11
    assert nmse(layer.state_of(1).heads, state.heads) < 1e-11
    assert torch.equal(layer.state_of(1).conv, state.conv.float())
    assert (layer.states[:, :BEFORE] == torch.tensor([0.0, 0.0, 0.0, 77.0])[:, None]).all()
    assert not layer.states[[0, 2]].any(), "wrote into another slot"


@each_isa
def test_chunks_neighbours_threads_and_copies_do_not_change_a_bit(isa: str) -> None:
    rows, other = rows_of(GROUPED, 70), rows_of(GROUPED, 70, seed=1)
    (whole,) = Layer(stream_of(isa, 1), GROUPED).step([rows], [0])
    for chunk in (1, 2, 33):
        layer = Layer(stream_of(isa, 3), GROUPED)
        got = []
        for first in range(0, 70, chunk):
            part = slice(first, first + chunk)
            got.append(layer.step([other[part], rows[part]], [2, 0])[1])
            if first == 33:  # a snapshot, and on from it
                layer.copy((0, 3), (2, 0), (3, 0))
        assert torch.equal(torch.cat(got), whole)


@each_isa
@each_form
def test_drafts_move_no_state_until_they_are_accepted(isa: str, heads: Mamba2Heads) -> None:
    """Whatever is drafted and rejected, outputs and states are those of rows without drafts, bit for bit."""
    texts, wrong = [rows_of(heads, 60), rows_of(heads, 60, seed=1)], rows_of(heads, 60, seed=2)
    whole = Layer(stream_of(isa, 1), heads)
    expected = whole.step(texts, [0, 2])
    layer, rng = Layer(stream_of(isa, 3), heads), random.Random(5)
    at, got = 0, list[list[torch.Tensor]](([], []))
    while at < 60:
        moved = min(rng.randint(0, 3), 59 - at)
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


@each_isa
def test_a_broken_sequence_stays_broken_and_alone(isa: str) -> None:
    rows, other = rows_of(GROUPED, 9), rows_of(GROUPED, 9, seed=1)
    rows[4, GROUPED.value_width :] = float("nan")
    layer = Layer(stream_of(isa), GROUPED)
    broken, sound = layer.step([rows, other], [0, 1])
    assert broken[:4].isfinite().all()
    assert broken[4:].isnan().any(dim=1).all()
    assert sound.isfinite().all()
    layer.copy((-1, 0))
    assert layer.step([other], [0])[0].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    layer, rows = Layer(stream_of(ISAS[0]), GROUPED), rows_of(GROUPED, 4)
    with pytest.raises(IndexError, match="state slot 4"):
        layer.step([rows], [4])
    with pytest.raises(ValueError, match="slot"):
        layer.step([rows, rows], [1, 1])
    with pytest.raises(ValueError, match="projected"):
        layer.step([rows[:, 1:]], [1])
    layer.states = layer.states[:, :-4].contiguous()
    with pytest.raises(ValueError, match="first"):
        layer.step([rows], [1])


def test_a_dt_of_any_size_keeps_its_softplus() -> None:
    """Above 20, softplus(x) is x; far below 0 it is next to nothing, and the state stays as it is."""
    rows = rows_of(ALONE, 6)
    rows[:, -ALONE.num_heads :] = torch.tensor([-90.0, 30.0, 0.0])
    layer = Layer(stream_of(ISAS[-1]), ALONE)
    (out,) = layer.step([rows], [0])
    expected, _ = mamba2(rows, weights_of(ALONE), EPS, ALONE, Mamba2State.empty(ALONE))
    assert nmse(out, expected) < 1e-11
