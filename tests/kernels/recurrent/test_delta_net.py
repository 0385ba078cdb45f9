"""Gated DeltaNet and Kimi Delta Attention on the CPU beside their float64 reference, and that nothing around a token
changes its bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.delta_net.reference import DeltaState, DeltaWeights, delta_net
from moeserve.kernels.stream_operands import (
    Activations,
    DeltaParameters,
    StateLayer,
    StateSequences,
)
from tests.kernels.operations import ISAS, needs_both, stream_of
from tests.kernels.recurrent.recurrent_layer import BEFORE, RecurrentLayer
from tests.kernels.weights import nmse

each_isa = pytest.mark.parametrize("isa", ISAS)
EPS = 1e-6
GROUPED = DeltaHeads(key_heads=2, value_heads=6, key_dim=64, value_dim=96, conv_kernel=4)
TILED = DeltaHeads(key_heads=2, value_heads=4, key_dim=32, value_dim=64, conv_kernel=3, is_tiled=True)
KIMI = DeltaHeads(key_heads=3, value_heads=3, key_dim=64, value_dim=64, conv_kernel=4, is_kimi=True)
BOUNDED = replace(KIMI, decay_bound=-5.0)
FORMS = [pytest.param(GROUPED, id="grouped"), pytest.param(TILED, id="tiled"), pytest.param(KIMI, id="kimi"),
         pytest.param(BOUNDED, id="bounded")]  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor

    @classmethod
    def random(cls, heads: DeltaHeads, n: int, seed: int = 0) -> Inputs:
        torch.manual_seed(seed)
        widths = (heads.channels, heads.value_width, heads.value_heads, heads.decays)
        return cls(*(torch.randn(n, width) for width in widths))

    def rows(self, part: slice) -> Inputs:
        return Inputs(self.qkv[part], self.z[part], self.b[part], self.a[part])

    def then(self, more: Inputs) -> Inputs:
        names = ("qkv", "z", "b", "a")
        return Inputs(*(torch.cat([getattr(self, name), getattr(more, name)]) for name in names))

    def merged(self, heads: DeltaHeads) -> torch.Tensor:
        """b and a as one product gives them: [n, key_heads, 2, value heads of each]."""
        per_key = [x.view(len(x), heads.key_heads, 1, -1) for x in (self.b, self.a)]
        return torch.cat(per_key, dim=2).flatten(1).contiguous()


def weights_of(heads: DeltaHeads) -> DeltaWeights:
    torch.manual_seed(99)
    rate = -torch.empty(heads.value_heads).uniform_(-4.0, 1.5).exp()
    conv = torch.randn(heads.conv_kernel, heads.channels) * 0.5
    return DeltaWeights(conv, rate, torch.randn(heads.decays), torch.rand(heads.value_dim) + 0.5)


class Layer(RecurrentLayer[DeltaHeads]):
    def step(
        self,
        parts: Sequence[Inputs],
        slots: Sequence[int],
        *,
        merged: bool = False,
        drafts: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Each part's rows as one sequence of the step, its state in its slot; the last of them are drafts."""
        counts = [len(part.z) for part in parts]
        qkv, z, b, a = (torch.cat([getattr(part, name) for part in parts]) for name in ("qkv", "z", "b", "a"))
        if merged:
            b = Inputs(qkv, z, b, a).merged(self.heads)
        of_heads: torch.Tensor | tuple[torch.Tensor, ...] = qkv
        if self.heads.is_kimi:  # three products
            widths = (self.heads.key_width, self.heads.key_width, self.heads.value_width)
            of_heads = tuple(part.contiguous() for part in qkv.split(widths, dim=1))
        w = weights_of(self.heads)
        parameters = DeltaParameters(w.conv, w.a, w.dt_bias, w.norm)

        def launch(
            state: StateLayer, sequences: StateSequences, out: Activations, pending: torch.Tensor | None
        ) -> None:
            self.stream.delta_net(
                of_heads, z, b, None if merged else a, parameters, EPS, self.heads, state, sequences, sum(counts),
                out, pending,
            )  # fmt: skip

        return self.launched(counts, slots, drafts, launch)

    def delta_state(self, slot: int) -> torch.Tensor:
        """[value_heads, key_dim, value_dim]: the columns' blocks side by side."""
        h = self.heads
        own = self.states[slot, BEFORE : BEFORE + h.delta_values]
        return own.view(h.value_heads, -1, h.key_dim, 32).transpose(1, 2).flatten(2)

    def conv_state(self, slot: int) -> torch.Tensor:
        h = self.heads
        own = self.states[slot, BEFORE + h.delta_values : BEFORE + h.state_values]
        return own.view(h.conv_kernel - 1, h.channels)


@each_isa
@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("heads", FORMS)
def test_against_float64(isa: str, heads: DeltaHeads, merged: bool) -> None:
    merged = merged and not heads.is_kimi
    layer, x = Layer(stream_of(isa), heads), Inputs.random(heads, 150)
    (out,) = layer.step([x], [1], merged=merged)
    expected, state = delta_net(x.qkv, x.z, x.b, x.a, weights_of(heads), EPS, heads, DeltaState.empty(heads))
    assert nmse(out, expected) < 1e-11
    assert nmse(layer.delta_state(1), state.delta) < 1e-11
    assert torch.equal(layer.conv_state(1), state.conv.float())
    assert (layer.states[:, :BEFORE] == torch.tensor([0.0, 0.0, 0.0, 77.0])[:, None]).all()
    assert not layer.states[[0, 2]].any(), "wrote into another slot"


@needs_both
@pytest.mark.parametrize("heads", FORMS)
def test_vector_instruction_sets_give_the_same_bits(heads: DeltaHeads) -> None:
    x, layers = Inputs.random(heads, 40), [Layer(stream_of(isa), heads) for isa in ("avx2", "avx512_vnni")]
    (a,), (b,) = (layer.step([x], [1]) for layer in layers)
    assert torch.equal(a, b)
    assert torch.equal(layers[0].states, layers[1].states)


@each_isa
@pytest.mark.parametrize("heads", [GROUPED, KIMI], ids=["grouped", "kimi"])
def test_chunks_neighbours_threads_and_copies_do_not_change_a_bit(isa: str, heads: DeltaHeads) -> None:
    x, other = Inputs.random(heads, 70), Inputs.random(heads, 70, seed=1)
    (whole,) = Layer(stream_of(isa, 1), heads).step([x], [0])
    for chunk in (1, 2, 33):
        layer = Layer(stream_of(isa, 3), heads)
        got = []
        for first in range(0, 70, chunk):
            part = slice(first, first + chunk)
            got.append(layer.step([other.rows(part), x.rows(part)], [2, 0])[1])
            if first == 33:  # a snapshot, and on from it
                layer.copy((0, 3), (2, 0), (3, 0))
        assert torch.equal(torch.cat(got), whole)


@each_isa
@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("heads", FORMS)
def test_drafts_move_no_state_until_they_are_accepted(isa: str, heads: DeltaHeads, merged: bool) -> None:
    """Whatever is drafted and rejected, outputs and states are those of rows without drafts, bit for bit."""
    merged = merged and not heads.is_kimi
    texts = [Inputs.random(heads, 60), Inputs.random(heads, 60, seed=1)]
    wrong = Inputs.random(heads, 60, seed=2)
    whole = Layer(stream_of(isa, 1), heads)
    expected = whole.step(texts, [0, 2], merged=merged)
    layer, rng = Layer(stream_of(isa, 3), heads), random.Random(5)
    at, got = 0, list[list[torch.Tensor]](([], []))
    while at < 60:
        moved = min(rng.randint(0, 3), 59 - at)
        rejected = [rng.randint(0, 2), rng.randint(0, 2)]
        right = [text.rows(slice(at, at + 1 + moved)) for text in texts]
        rows = [part.then(wrong.rows(slice(0, more))) for part, more in zip(right, rejected, strict=True)]
        outs = layer.step(rows, [0, 2], merged=merged, drafts=[moved + more for more in rejected])
        for parts, out in zip(got, outs, strict=True):
            parts.append(out[: 1 + moved])
        if moved:
            layer.commit([0, 2], [moved, moved])
        at += 1 + moved
    assert all(torch.equal(torch.cat(parts), text) for parts, text in zip(got, expected, strict=True))
    assert torch.equal(layer.states[[0, 2]], whole.states[[0, 2]])


@each_isa
def test_a_broken_sequence_stays_broken_and_alone(isa: str) -> None:
    x, other = Inputs.random(GROUPED, 9), Inputs.random(GROUPED, 9, seed=1)
    x.qkv[4] = float("nan")
    layer = Layer(stream_of(isa), GROUPED)
    broken, sound = layer.step([x, other], [0, 1])
    assert broken[:4].isfinite().all()
    assert broken[4:].isnan().any(dim=1).all()
    assert sound.isfinite().all()
    layer.copy((-1, 0))
    assert layer.step([other], [0])[0].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    layer, x = Layer(stream_of(ISAS[0]), GROUPED), Inputs.random(GROUPED, 4)
    with pytest.raises(IndexError, match="state slot 4"):
        layer.step([x], [4])
    with pytest.raises(ValueError, match="slot"):
        layer.step([x, x], [1, 1])
    with pytest.raises(IndexError, match="state slot -2"):
        layer.copy((-2, 0))
    with pytest.raises(ValueError, match="first"):
        Layer(stream_of(ISAS[0]), TILED).stream.delta_net(
            x.qkv, x.z, x.b, x.a, DeltaParameters(*weights_of(GROUPED)), EPS, GROUPED,
            StateLayer(torch.zeros(1, 10), 0), StateSequences(*torch.zeros(3, 1, dtype=torch.int32)), 4,
            Activations(4, GROUPED.value_width),
        )  # fmt: skip


@each_isa
def test_a_state_decays_to_zero(isa: str) -> None:
    """And not to denormal numbers, which make an operation a hundred times as slow."""
    layer, smallest = Layer(stream_of(isa), GROUPED), torch.finfo(torch.float32).tiny
    layer.states[1, BEFORE : BEFORE + GROUPED.delta_values] = 1e-30
    still = Inputs(*(torch.zeros(60, width) for width in (GROUPED.channels, GROUPED.value_width, 6, 6)))
    layer.step([still], [1])
    state = layer.delta_state(1)
    assert not state.all()
    assert (state[state != 0].abs() >= smallest).all()
