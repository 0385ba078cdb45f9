"""LFM2's short convolution on the CPU beside its float64 reference; nothing around a token changes its bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.kernels.short_conv.reference import short_conv
from moeserve.kernels.stream_operands import Activations, StateLayer, StateSequences
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.recurrent.recurrent_layer import (
    BEFORE,
    RowsLayer,
    check_that_chunks_change_no_bit,
    check_that_drafts_move_no_state,
)
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
LFM2 = ShortConvHeads(channels=160, conv_kernel=3)  # two blocks of 64 channels and half of one
LONG = ShortConvHeads(channels=32, conv_kernel=5)
each_form = pytest.mark.parametrize("heads", [LFM2, LONG], ids=["three taps", "five taps"])


def conv_of(h: ShortConvHeads) -> torch.Tensor:
    return torch.randn(h.conv_kernel, h.channels, generator=torch.Generator().manual_seed(99)) * 0.5


def rows_of(h: ShortConvHeads, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, h.row_width, generator=torch.Generator().manual_seed(seed))


def no_state(h: ShortConvHeads) -> torch.Tensor:
    return torch.zeros(h.conv_kernel - 1, h.channels)


class Layer(RowsLayer[ShortConvHeads]):
    def step(
        self, parts: Sequence[torch.Tensor], slots: Sequence[int], drafts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        projected, conv, counts = torch.cat(list(parts)), conv_of(self.heads), [len(part) for part in parts]

        def launch(
            state: StateLayer, sequences: StateSequences, out: Activations, pending: torch.Tensor | None
        ) -> None:
            self.stream.short_conv(projected, conv, state, sequences, sum(counts), out, pending)

        outs = self.launched(counts, slots, drafts, launch)
        assert all(out.isfinite().all() for out in outs)
        return outs

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
    check_that_chunks_change_no_bit(lambda threads: Layer(stream_of(isa, threads), heads), rows, other)


@each_isa
@each_form
def test_drafts_move_no_state_until_they_are_accepted(isa: str, heads: ShortConvHeads) -> None:
    texts, wrong = [rows_of(heads, 60), rows_of(heads, 60, seed=1)], rows_of(heads, 60, seed=2)
    check_that_drafts_move_no_state(lambda threads: Layer(stream_of(isa, threads), heads), texts, wrong, 5)


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
