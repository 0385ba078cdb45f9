"""LFM2's short convolution in Triton beside its float64 reference."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.delta_net.op import SequenceDrafts, StepSequences
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.kernels.short_conv.op import BLOCK, commit_drafts
from moeserve.kernels.short_conv.op import short_conv as launch
from moeserve.kernels.short_conv.reference import short_conv
from tests.kernels.weights import nmse

HEADS = ShortConvHeads(channels=BLOCK + 96, conv_kernel=3)  # a block of a program, and part of one
BEFORE = 16  # values of other layers in a slot before this one's
SLOTS, ROWS = 4, 8


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CONV = normal(HEADS.conv_kernel, HEADS.channels, seed=6) * 0.5


def step(
    states: torch.Tensor,
    tokens: torch.Tensor,
    counts: list[int],
    slots: list[int],
    drafts: tuple[list[int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """tokens [n, row_width]: padded to ROWS rows, of as many sequences. drafts: how many of each sequence's last rows
    are drafts, and their records."""
    n = sum(counts)
    device = torch.full((ROWS, HEADS.row_width), float("nan"), device=DEVICE)
    device[:n] = tokens.to(DEVICE)
    empty = [0] * (ROWS - len(counts))
    of_row = [i for i, count in enumerate(counts) for _ in range(count)] + [0] * (ROWS - n)
    first = [sum(counts[:i]) for i in range(len(counts))]
    of_drafts = records = None
    if drafts is not None:
        drafted, records = drafts
        before = [sum(drafted[:i]) for i in range(len(drafted))]
        of_drafts = SequenceDrafts(ints(drafted + empty), ints(before + empty))
    sequences = StepSequences(
        ints(first + empty), ints(counts + empty), ints(slots + empty), ints(of_row), of_drafts
    )
    y = GpuActivations.empty(ROWS, HEADS.channels, DEVICE, dtype=torch.float32, quantised=True)
    assert y.x is not None
    assert y.codes is not None
    y.x.fill_(77.0)
    of_layer = CONV.to(DEVICE), HEADS, states[:, BEFORE:]
    launch(device, *of_layer, sequences, counter(n), y.x, y.codes, y.scales, records)
    assert (y.x[n:] == 77.0).all()
    q = quantize(y.x[:n].cpu())
    assert (y.codes[:n].cpu().int() - q.codes).abs().max() <= 1
    return y.x[:n].cpu()


def test_sequences_of_several_lengths_over_steps() -> None:
    states = torch.full((SLOTS, BEFORE + HEADS.state_values), 77.0, device=DEVICE)
    states[:, BEFORE:] = 0.0
    tokens = {slot: normal(12, HEADS.row_width, seed=slot) for slot in (0, 2, 3)}
    done = dict.fromkeys(tokens, 0)
    got: dict[int, list[torch.Tensor]] = {slot: [] for slot in tokens}
    for rows in [{2: 1, 0: 5}, {0: 1, 2: 1, 3: 1}, {3: 6, 0: 2}, {2: 1}]:
        parts = [tokens[slot][done[slot] : done[slot] + count] for slot, count in rows.items()]
        out = step(states, torch.cat(parts), list(rows.values()), list(rows))
        for (slot, count), part in zip(rows.items(), out.split(list(rows.values())), strict=True):
            got[slot].append(part)
            done[slot] += count
    for slot, outs in got.items():
        zeros = torch.zeros(HEADS.conv_kernel - 1, HEADS.channels)
        expected, state = short_conv(tokens[slot][: done[slot]], CONV, zeros)
        assert nmse(torch.cat(outs), expected) < 1e-12
        assert nmse(states[slot, BEFORE:].cpu().view(state.shape), state) < 1e-12
    assert not states[1, BEFORE:].any(), "wrote into a free slot"
    assert (states[:, :BEFORE] == 77.0).all()


def test_accepted_drafts_move_the_state_as_rows_do() -> None:
    """Rows of drafts see those before them; the state is moved by accepted ones alone, with a row's bits."""
    plain = torch.zeros(SLOTS, BEFORE + HEADS.state_values, device=DEVICE)
    a, b = normal(6, HEADS.row_width), normal(5, HEADS.row_width, seed=1)
    step(plain, torch.cat([a[:2], b[:1]]), [2, 1], [2, 0])
    drafted, whole = plain.clone(), plain.clone()
    records = torch.full((8, HEADS.pending_values), float("nan"), device=DEVICE)
    with_drafts = torch.cat([a[2:6], b[1:4]]), [4, 3], [2, 0]
    assert torch.equal(step(drafted, *with_drafts, ([3, 2], records)), step(whole, *with_drafts))
    step(plain, torch.cat([a[2:3], b[1:2]]), [1, 1], [2, 0])
    assert torch.equal(drafted, plain)  # no draft is accepted yet
    moved = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
    moved[:, :2] = ints([[0, 2], [3, 0], [1, 2]])  # one of the second's two drafts, two of the first's three
    commit_drafts(records[None], drafted, ints([BEFORE]), moved, 2, HEADS)
    step(plain, torch.cat([a[3:5], b[2:3]]), [2, 1], [2, 0])
    assert torch.equal(drafted, plain)
    last = torch.cat([a[5:], b[3:4]]), [1, 1], [2, 0]
    assert torch.equal(step(drafted, *last), step(plain, *last))
