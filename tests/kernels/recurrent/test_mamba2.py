"""Mamba-2 on the CPU beside its float64 reference, and that nothing around a token changes its bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.mamba2.reference import Mamba2State, Mamba2Weights, mamba2
from moeserve.kernels.stream_operands import Activations, StateLayer, StateSequences
from moeserve.models.loading.mamba2 import mamba2_parameters
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.sources.gguf import names as n
from tests.kernels.operations import ISAS, needs_both, stream_of
from tests.kernels.recurrent.recurrent_layer import (
    BEFORE,
    RowsLayer,
    check_that_chunks_change_no_bit,
    check_that_drafts_move_no_state,
)
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
EPS = 1e-5
GROUPED = Mamba2Heads(num_heads=6, num_groups=2, head_dim=64, state_dim=96, conv_kernel=4)
ALONE = Mamba2Heads(num_heads=3, num_groups=1, head_dim=32, state_dim=32, conv_kernel=2)
each_form = pytest.mark.parametrize("heads", [GROUPED, ALONE], ids=["groups", "one group"])


def weights_of(h: Mamba2Heads, *, has_norm: bool = True) -> Mamba2Weights:
    torch.manual_seed(99)
    rate = -torch.empty(h.num_heads).uniform_(-4.0, 1.5).exp()
    conv, conv_bias = torch.randn(h.conv_kernel, h.channels) * 0.5, torch.randn(h.channels) * 0.3
    skip = torch.randn(h.num_heads) * 0.3 + 1.0
    dt_bias, norm = torch.randn(h.num_heads) - 1.0, torch.rand(h.value_width) + 0.5
    return Mamba2Weights(conv, conv_bias, rate, dt_bias, skip, norm if has_norm else None)


def rows_of(h: Mamba2Heads, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, h.row_width, generator=torch.Generator().manual_seed(seed))


class Layer(RowsLayer[Mamba2Heads]):
    def __init__(
        self, stream: CpuStream, heads: Mamba2Heads, slots: int = 4, *, has_norm: bool = True
    ) -> None:
        super().__init__(stream, heads, slots)
        w = weights_of(heads)
        names = (n.SSM_A, n.bias_of_part(n.SSM_DT), n.SSM_D, n.of_part(n.SSM_NORM))
        file = {n.of_part(n.SSM_CONV1D): w.conv.t(), n.bias_of_part(n.SSM_CONV1D): w.conv_bias}
        file |= {name: tensor for name, tensor in zip(names, w[2:], strict=True) if tensor is not None}
        shape = Mamba2Shape(heads, norm_by_group=False, eps=EPS, has_norm=has_norm)
        self.w = mamba2_parameters(shape, lambda name: file[name].contiguous(), as_attention=True)

    def step(
        self, parts: Sequence[torch.Tensor], slots: Sequence[int], drafts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        counts = [len(part) for part in parts]
        rows, decays = torch.cat(list(parts)), torch.empty(sum(counts), self.heads.num_heads)

        def launch(
            state: StateLayer, sequences: StateSequences, out: Activations, pending: torch.Tensor | None
        ) -> None:
            self.stream.mamba2(
                rows, decays, self.w, EPS, self.heads, state, sequences, sum(counts), out, pending
            )

        return self.launched(counts, slots, drafts, launch)

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


@needs_both
@each_form
def test_vector_instruction_sets_give_the_same_bits(heads: Mamba2Heads) -> None:
    rows = rows_of(heads, 40)
    layers = [Layer(stream_of(isa), heads) for isa in ("avx2", "avx512_vnni")]
    (a,), (b,) = (layer.step([rows], [1]) for layer in layers)
    assert torch.equal(a, b)
    assert torch.equal(layers[0].states, layers[1].states)


@each_isa
@each_form
def test_an_output_that_is_not_normalised(isa: str, heads: Mamba2Heads) -> None:
    layer, rows = Layer(stream_of(isa, 3), heads, has_norm=False), rows_of(heads, 30)
    (out,) = layer.step([rows], [1])
    expected, _ = mamba2(rows, weights_of(heads, has_norm=False), EPS, heads, Mamba2State.empty(heads))
    assert nmse(out, expected) < 1e-11


@each_isa
def test_chunks_neighbours_threads_and_copies_do_not_change_a_bit(isa: str) -> None:
    rows, other = rows_of(GROUPED, 70), rows_of(GROUPED, 70, seed=1)
    check_that_chunks_change_no_bit(lambda threads: Layer(stream_of(isa, threads), GROUPED), rows, other)


@each_isa
@each_form
def test_drafts_move_no_state_until_they_are_accepted(isa: str, heads: Mamba2Heads) -> None:
    texts, wrong = [rows_of(heads, 60), rows_of(heads, 60, seed=1)], rows_of(heads, 60, seed=2)
    check_that_drafts_move_no_state(lambda threads: Layer(stream_of(isa, threads), heads), texts, wrong, 3)


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
