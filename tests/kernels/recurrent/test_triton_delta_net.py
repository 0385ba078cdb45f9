"""Gated DeltaNet in Triton beside its float64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.delta_net.heads import DELTA_CHUNK, DeltaHeads
from moeserve.kernels.delta_net.op import (
    DeltaTensors,
    Gates,
    SequenceDrafts,
    StepSequences,
    chunked_rule,
    chunks_of,
    commit_drafts,
    convolve,
    gated_norm,
    kimi_chunked_rule,
    recurrent_rule,
    sigmoid_gate,
)
from moeserve.kernels.delta_net.reference import DeltaState, DeltaWeights, delta_net
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.weights import nmse

EPS = 1e-6
GROUPED = DeltaHeads(key_heads=2, value_heads=4, key_dim=32, value_dim=64, conv_kernel=4)
TILED = DeltaHeads(key_heads=2, value_heads=4, key_dim=64, value_dim=32, conv_kernel=3, is_tiled=True)
KIMI = DeltaHeads(key_heads=2, value_heads=2, key_dim=64, value_dim=64, conv_kernel=4, is_kimi=True)
BOUNDED = replace(KIMI, decay_bound=-5.0)
BEFORE = 16  # values of other layers in a slot before this one's
SLOTS = 4
DRAFTS = 8  # records


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(heads: DeltaHeads) -> DeltaWeights:
    rate = -(normal(heads.value_heads, seed=5) - 1.0).exp()
    conv = normal(heads.conv_kernel, heads.channels, seed=6) * 0.5
    bias, norm = normal(heads.decays, seed=7), normal(heads.value_dim, seed=8) * 0.1 + 1.0
    return DeltaWeights(conv, rate, bias, norm)


class Layer:
    def __init__(self, heads: DeltaHeads) -> None:
        self.heads = heads
        self.states = torch.full((SLOTS, BEFORE + heads.state_values), 77.0, device=DEVICE)
        self.states[:, BEFORE:] = 0.0
        self.records = torch.full((DRAFTS, heads.pending_values), float("nan"), device=DEVICE)

    def step(
        self,
        projected: torch.Tensor,
        counts: list[int],
        slots: list[int],
        rows: int,
        *,
        by_chunks: bool = False,
        drafts: list[int] | None = None,
    ) -> torch.Tensor:
        """projected [n, qkv z b a]: padded to `rows`, and to as many sequences where they are not gone through by
        chunks. drafts: how many of each sequence's last rows are drafts, recorded in `records`."""
        h, n = self.heads, sum(counts)
        device = torch.full((rows, projected.shape[1]), float("nan"), device=DEVICE)
        device[:n] = projected.to(DEVICE)
        qkv, z, b, a = device.split([h.channels, h.value_width, h.value_heads, h.decays], dim=1)
        first = [sum(counts[:i]) for i in range(len(counts))]
        empty = [] if by_chunks else [0] * (rows - len(counts))
        of_row = [i for i, count in enumerate(counts) for _ in range(count)] + [0] * (rows - n)
        of_drafts = None
        if drafts is not None:
            before = [sum(drafts[:i]) for i in range(len(drafts))]
            of_drafts = SequenceDrafts(ints(drafts + empty), ints(before + empty))
        sequences = StepSequences(
            ints(first + empty), ints(counts + empty), ints(slots + empty), ints(of_row), of_drafts
        )
        conv, rate, bias, norm = (x.to(DEVICE) for x in weights_of(h))
        mixed, o = (torch.full((rows, width), 77.0, device=DEVICE) for width in (h.channels, h.value_width))
        gates = Gates(b, a, h.value_heads // h.key_heads)
        x = DeltaTensors(qkv, mixed, gates, rate, bias, self.states[:, BEFORE:], o)
        convolve(x, conv, h, sequences, counter(n))
        if by_chunks:
            chunks = ints(chunks_of(np.array(first, np.int32), np.array(counts, np.int32)))
            inverse = torch.full((rows, h.value_heads, DELTA_CHUNK), float("nan"), device=DEVICE)
            if h.is_kimi:
                kimi_chunked_rule(x, h, sequences, chunks, inverse, torch.full_like(inverse, float("nan")))
            else:
                chunked_rule(x, h, sequences, chunks, inverse)
        else:
            recurrent_rule(x, h, sequences, None if drafts is None else self.records)
        assert (o[n:] == 77.0).all()
        y = GpuActivations.empty(rows, h.value_width, DEVICE, dtype=torch.float32, quantised=True)
        assert y.x is not None
        assert y.codes is not None
        y.x.fill_(77.0)
        gated_norm(o, z, norm, EPS, counter(n), y.x, y.codes, y.scales, sigmoid=h.is_kimi)
        assert (y.x[n:] == 77.0).all()
        q = quantize(y.x[:n].cpu())
        assert (y.codes[:n].cpu().int() - q.codes).abs().max() <= 1
        return y.x[:n].cpu()

    def state(self, slot: int) -> DeltaState:
        h = self.heads
        own = self.states[slot, BEFORE:].cpu()
        delta = own[: h.delta_values].view(h.value_heads, h.key_dim, h.value_dim)
        return DeltaState(delta, own[h.delta_values :].view(h.conv_kernel - 1, h.channels))

    def commit(self, slots: list[int], first: list[int], accepted: list[int]) -> None:
        moved = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
        for row, column in zip(moved, (slots, first, accepted), strict=True):
            row[: len(column)] = ints(column)
        commit_drafts(self.records[None], self.states, ints([BEFORE]), moved, len(slots), self.heads)


def check(layer: Layer, slot: int, projected: torch.Tensor, out: torch.Tensor) -> None:
    """out, and the layer's state in `slot`, after these tokens."""
    h = layer.heads
    qkv, z, b, a = projected.split([h.channels, h.value_width, h.value_heads, h.decays], dim=1)
    expected, state = delta_net(qkv, z, b, a, weights_of(h), EPS, h, DeltaState.empty(h))
    assert nmse(out, expected) < 1e-10
    assert nmse(layer.state(slot).delta, state.delta) < 1e-10
    assert torch.equal(layer.state(slot).conv, state.conv.float())


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads",
    [GROUPED, TILED, KIMI, BOUNDED],
    ids=["grouped", "tiled", "kimi", "bounded"],
)
def test_sequences_of_several_lengths_over_steps(heads: DeltaHeads) -> None:
    width = heads.channels + heads.value_width + heads.value_heads + heads.decays
    layer = Layer(heads)
    tokens = {slot: normal(12, width, seed=slot) for slot in (0, 2, 3)}
    done = dict.fromkeys(tokens, 0)
    got: dict[int, list[torch.Tensor]] = {slot: [] for slot in tokens}
    for step in [{2: 1, 0: 5}, {0: 1, 2: 1, 3: 1}, {3: 6, 0: 2}, {2: 1}]:
        rows = [tokens[slot][done[slot] : done[slot] + count] for slot, count in step.items()]
        out = layer.step(torch.cat(rows), list(step.values()), list(step), 8)
        for (slot, count), part in zip(step.items(), out.split(list(step.values())), strict=True):
            got[slot].append(part)
            done[slot] += count
    for slot, parts in got.items():
        check(layer, slot, tokens[slot][: done[slot]], torch.cat(parts))
    assert not layer.states[1, BEFORE:].any(), "wrote into a free slot"
    assert (layer.states[:, :BEFORE] == 77.0).all()


def test_decays_with_a_lower_bound() -> None:
    """The reference's sigmoid beside the kernel's; without the bound, others."""
    width = BOUNDED.channels + BOUNDED.value_width + BOUNDED.value_heads + BOUNDED.decays
    rows, layer, other = normal(2, width), Layer(BOUNDED), Layer(KIMI)
    out = layer.step(rows, [2], [1], 2)
    check(layer, 1, rows, out)
    assert nmse(other.step(rows, [2], [1], 2), out) > 1e-3


@pytest.mark.parametrize("heads", [TILED, KIMI], ids=["tiled", "kimi"])
def test_accepted_drafts_move_the_state_as_rows_do(heads: DeltaHeads) -> None:
    """Rows of drafts see those before them; the state is moved by accepted ones alone, with a row's bits."""
    width = heads.channels + heads.value_width + heads.value_heads + heads.decays
    plain, drafted = Layer(heads), Layer(heads)
    a, b = normal(6, width), normal(5, width, seed=1)
    for layer in (plain, drafted):
        layer.step(torch.cat([a[:2], b[:1]]), [2, 1], [2, 0], 8)
    out = drafted.step(torch.cat([a[2:6], b[1:4]]), [4, 3], [2, 0], 8, drafts=[3, 2])
    whole = Layer(heads)
    whole.states.copy_(plain.states)
    assert torch.equal(out, whole.step(torch.cat([a[2:6], b[1:4]]), [4, 3], [2, 0], 8))
    plain.step(torch.cat([a[2:3], b[1:2]]), [1, 1], [2, 0], 2)
    assert torch.equal(drafted.states, plain.states)  # no draft is accepted yet
    drafted.commit([2], [0], [2])  # two of the first's three drafts, none of the second's
    plain.step(a[3:5], [2], [2], 2)
    assert torch.equal(drafted.states, plain.states)
    assert torch.equal(
        drafted.step(torch.cat([a[5:], b[1:2]]), [1, 1], [2, 0], 2),
        plain.step(torch.cat([a[5:], b[1:2]]), [1, 1], [2, 0], 2),
    )


# Decays down to e^-30 a token: their product over a chunk is no float32.
SMALL_KIMI = DeltaHeads(key_heads=2, value_heads=2, key_dim=32, value_dim=32, conv_kernel=4, is_kimi=True)
CHUNKED = {
    "one decay a head": DeltaHeads(key_heads=1, value_heads=2, key_dim=32, value_dim=32, conv_kernel=4),
    "kimi": SMALL_KIMI,
    "bounded": replace(SMALL_KIMI, decay_bound=-5.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("heads", CHUNKED.values(), ids=CHUNKED.keys())
def test_prompts_by_chunks(heads: DeltaHeads) -> None:
    """Cut where a chunk is whole and where it is not, beside another; a step token by token goes on from it."""
    layer, width = Layer(heads), heads.channels + heads.value_width + heads.value_heads + heads.decays
    first, second = normal(74, width), normal(7, width, seed=1)
    first[30:50] = first[30]  # a run of the same token: the inverse is far from the identity
    first[10:25, -heads.decays :] *= 10
    out = layer.step(torch.cat([first[:70], second[:3]]), [70, 3], [2, 0], 80, by_chunks=True)
    again = layer.step(torch.cat([second[3:6], first[70:]]), [3, 4], [0, 2], 8, by_chunks=True)
    last = layer.step(second[6:], [1], [0], 1)
    check(layer, 2, first, torch.cat([out[:70], again[3:]]))
    check(layer, 0, second, torch.cat([out[70:], again[:3], last]))
    assert not layer.states[[1, 3], BEFORE:].any(), "wrote into a free slot"


# The interpreter cuts bfloat16 off where a GPU rounds.
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
)
def test_sigmoid_gate_of_what_is_not_quantised(dtype: torch.dtype) -> None:
    x, both = normal(3, 128).to(dtype), normal(3, 200, seed=1).to(dtype)
    mine = x.clone().to(DEVICE)
    sigmoid_gate(mine, both.to(DEVICE)[:, 40:168], 64, counter(2), None, None)
    expected = x.double() * both[:, 40:168].double().sigmoid()
    assert nmse(mine[:2].cpu(), expected[:2]) < (1e-12 if dtype == torch.float32 else 1e-5)


def test_sigmoid_gate() -> None:
    x, both = normal(3, 128), normal(3, 200, seed=1)
    mine = x.clone().to(DEVICE)
    y = GpuActivations.empty(3, 128, DEVICE, dtype=torch.float32, quantised=True)
    sigmoid_gate(mine, both.to(DEVICE)[:, 40:168], 64, counter(2), y.codes, y.scales)
    expected = x.double() * both[:, 40:168].double().sigmoid()
    assert nmse(mine[:2].cpu(), expected[:2]) < 1e-12
    assert torch.equal(mine[2].cpu(), x[2])
    assert y.codes is not None
    assert (y.codes[:2].cpu().int() - quantize(expected[:2].float()).codes).abs().max() <= 1
