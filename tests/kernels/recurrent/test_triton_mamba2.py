"""Mamba-2's Triton kernels beside their float64 reference, token by token and by chunks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.delta_net.op import SequenceDrafts, StepSequences
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.mamba2.op import Mamba2Tensors, commit_drafts, convolve, gated_norm, scan
from moeserve.kernels.mamba2.reference import Mamba2State, Mamba2Weights, mamba2
from moeserve.kernels.quantize.reference import quantize
from tests.kernels.weights import nmse

EPS = 1e-5
GROUPED = Mamba2Heads(num_heads=4, num_groups=2, head_dim=64, state_dim=32, conv_kernel=4)
ALONE = Mamba2Heads(num_heads=3, num_groups=1, head_dim=32, state_dim=96, conv_kernel=3)
BEFORE = 16  # values of other layers in a slot before this one's
SLOTS = 4
DRAFTS = 8  # records


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(h: Mamba2Heads, *, has_norm: bool = True) -> Mamba2Weights:
    return Mamba2Weights(
        conv=normal(h.conv_kernel, h.channels, seed=6) * 0.5,
        conv_bias=normal(h.channels, seed=9) * 0.3,
        a=-(normal(h.num_heads, seed=5) - 1.0).exp(),
        dt_bias=normal(h.num_heads, seed=7),
        d=normal(h.num_heads, seed=10),
        norm=normal(h.value_width, seed=8) * 0.1 + 1.0 if has_norm else None,
    )


class Layer:
    def __init__(self, heads: Mamba2Heads, *, has_norm: bool = True) -> None:
        self.heads = heads
        self.w = weights_of(heads, has_norm=has_norm)
        self.states = torch.full((SLOTS, BEFORE + heads.state_values), 77.0, device=DEVICE)
        self.states[:, BEFORE:] = 0.0
        self.records = torch.full((DRAFTS, heads.pending_values), float("nan"), device=DEVICE)

    def step(
        self,
        tokens: torch.Tensor,
        counts: list[int],
        slots: list[int],
        rows: int,
        *,
        by_chunks: bool = False,
        drafts: list[int] | None = None,
    ) -> torch.Tensor:
        """tokens [n, row_width]: padded to `rows`, and to as many sequences where they are not gone through by
        chunks. drafts: how many of each sequence's last rows are drafts, recorded in `records`."""
        h, n = self.heads, sum(counts)
        device = torch.full((rows, h.row_width), float("nan"), device=DEVICE)
        device[:n] = tokens.to(DEVICE)
        z, others = device[:, : h.value_width], device[:, h.value_width :]
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
        w = Mamba2Weights(*(None if x is None else x.to(DEVICE) for x in self.w))
        mixed, o = (torch.full((rows, width), 77.0, device=DEVICE) for width in (h.channels, h.value_width))
        x = Mamba2Tensors(others, mixed, w.a, w.dt_bias, w.d, self.states[:, BEFORE:], o)
        convolve(x, w.conv, w.conv_bias, h, sequences, counter(n))
        assert (mixed[n:] == 77.0).all()
        scan(x, h, sequences, by_chunks=by_chunks, records=None if drafts is None else self.records)
        assert (o[n:] == 77.0).all()
        y = GpuActivations.empty(rows, h.value_width, DEVICE, dtype=torch.float32, quantised=True)
        assert y.x is not None
        assert y.codes is not None
        y.x.fill_(77.0)
        gated_norm(o, z, w.norm, EPS, h.num_groups, counter(n), y.x, y.codes, y.scales)
        assert (y.x[n:] == 77.0).all()
        q = quantize(y.x[:n].cpu())
        assert (y.codes[:n].cpu().int() - q.codes).abs().max() <= 1
        return y.x[:n].cpu()

    def state(self, slot: int) -> Mamba2State:
        h = self.heads
        own = self.states[slot, BEFORE:].cpu()
        of_heads = own[: h.delta_values].view(h.num_heads, h.state_dim, h.head_dim)
        return Mamba2State(of_heads, own[h.delta_values :].view(h.conv_kernel - 1, h.channels))

    def commit(self, slots: list[int], first: list[int], accepted: list[int]) -> None:
        moved = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
        for row, column in zip(moved, (slots, first, accepted), strict=True):
            row[: len(column)] = ints(column)
        commit_drafts(self.records[None], self.states, ints([BEFORE]), moved, len(slots), self.heads)


def check(layer: Layer, slot: int, tokens: torch.Tensor, out: torch.Tensor) -> None:
    """out, and the layer's state in `slot`, after these tokens."""
    h = layer.heads
    expected, state = mamba2(tokens, layer.w, EPS, h, Mamba2State.empty(h))
    assert nmse(out, expected) < 1e-10
    assert nmse(layer.state(slot).heads, state.heads) < 1e-10
    assert torch.equal(layer.state(slot).conv, state.conv.float())


@pytest.mark.parametrize("heads", [GROUPED, ALONE], ids=["groups", "one group"])
def test_sequences_of_several_lengths_over_steps(heads: Mamba2Heads) -> None:
    layer = Layer(heads)
    tokens = {slot: normal(12, heads.row_width, seed=slot) for slot in (0, 2, 3)}
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


@pytest.mark.parametrize("heads", [GROUPED, ALONE], ids=["groups", "one group"])
def test_accepted_drafts_move_the_state_as_rows_do(heads: Mamba2Heads) -> None:
    """Rows of drafts see those before them; the state is moved by accepted ones alone, with a row's bits."""
    plain, drafted = Layer(heads), Layer(heads)
    a, b = normal(6, heads.row_width), normal(5, heads.row_width, seed=1)
    for layer in (plain, drafted):
        layer.step(torch.cat([a[:2], b[:1]]), [2, 1], [2, 0], 8)
    out = drafted.step(torch.cat([a[2:6], b[1:4]]), [4, 3], [2, 0], 8, drafts=[3, 2])
    whole = Layer(heads)
    whole.states.copy_(plain.states)
    assert torch.equal(out, whole.step(torch.cat([a[2:6], b[1:4]]), [4, 3], [2, 0], 8))
    plain.step(torch.cat([a[2:3], b[1:2]]), [1, 1], [2, 0], 2)
    assert torch.equal(drafted.states, plain.states)  # no draft is accepted yet
    drafted.commit([0, 2], [3, 0], [1, 2])  # one of the second's two drafts, two of the first's three
    plain.step(torch.cat([a[3:5], b[2:3]]), [2, 1], [2, 0], 4)
    assert torch.equal(drafted.states, plain.states)
    assert torch.equal(
        drafted.step(torch.cat([a[5:], b[3:4]]), [1, 1], [2, 0], 2),
        plain.step(torch.cat([a[5:], b[3:4]]), [1, 1], [2, 0], 2),
    )


def test_an_output_that_is_not_normalised() -> None:
    layer, tokens = Layer(GROUPED, has_norm=False), normal(5, GROUPED.row_width)
    check(layer, 0, tokens, layer.step(tokens, [5], [0], 8))


@pytest.mark.parametrize(
    "heads",
    [pytest.param(GROUPED, id="groups"), pytest.param(ALONE, id="one group", marks=pytest.mark.slow)],
)
def test_prompts_by_chunks(heads: Mamba2Heads) -> None:
    """Cut where a chunk is whole and where it is not, beside another; a step token by token goes on from it."""
    layer = Layer(heads)
    tokens, other = normal(150, heads.row_width), normal(3, heads.row_width, seed=1)
    both = torch.cat([tokens[:70], other])
    first, of_other = layer.step(both, [70, 3], [1, 0], 73, by_chunks=True).split([70, 3])
    second = layer.step(tokens[70:134], [64], [1], 64, by_chunks=True)
    third = layer.step(tokens[134:], [16], [1], 16)
    check(layer, 1, tokens, torch.cat([first, second, third]))
    check(layer, 0, other, of_other)
