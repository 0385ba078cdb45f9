"""A recurrent layer with its states on the CPU, and what holds for each kind: what is around a token changes no bit."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.kernels.stream_operands import Activations, StateDrafts, StateLayer, StateSequences

BEFORE = 7  # values of other layers in a slot before this one's

Heads = TypeVar("Heads", DeltaHeads, Mamba2Heads, ShortConvHeads)
# Launches the layer's operation: its state, the step's sequences, the output, the drafts' record if there are drafts.
Launch = Callable[[StateLayer, StateSequences, Activations, torch.Tensor | None], None]


class RecurrentLayer(Generic[Heads]):
    def __init__(self, stream: CpuStream, heads: Heads, slots: int = 4) -> None:
        self.stream = stream
        self.heads: Heads = heads
        self.states = torch.full((slots, BEFORE + heads.state_values + 3), 77.0)
        self.copy((-1, 0), (-1, 1), (-1, 2))

    def copy(self, *pairs: tuple[int, int]) -> None:
        self.stream.copy_states(self.states, torch.tensor(pairs, dtype=torch.int32))
        self.stream.wait()

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """After a step with drafts of all these sequences."""
        slot, moved = (torch.tensor(x, dtype=torch.int32) for x in (slots, accepted))
        state = StateLayer(self.states, BEFORE)
        self.stream.commit_states(self.heads, state, slot, self.first, moved, self.pending)
        self.stream.wait()

    def launched(
        self, counts: Sequence[int], slots: Sequence[int], drafts: Sequence[int] | None, launch: Launch
    ) -> list[torch.Tensor]:
        """Returns the outputs of a step of sequences with `counts` rows, their states in `slots`; the last of the rows
        are drafts."""
        total = sum(counts)
        out = Activations(total + 1, self.heads.value_width)
        out.f32.fill_(12345.0)
        of_drafts = pending = None
        if drafts is not None:
            self.first = torch.tensor([sum(drafts[:i]) for i in range(len(drafts))], dtype=torch.int32)
            of_drafts = StateDrafts(torch.tensor(drafts, dtype=torch.int32), self.first)
            self.pending = pending = torch.full((sum(drafts), self.heads.pending_values), torch.nan)
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        columns = (torch.tensor(x, dtype=torch.int32) for x in (firsts, counts, slots))
        launch(StateLayer(self.states, BEFORE), StateSequences(*columns, of_drafts), out, pending)
        self.stream.wait()
        assert (out.f32[total] == 12345.0).all(), "wrote past the end"
        sound = out.f32[:total].isfinite().all(dim=1)
        assert torch.equal(out.q8[:total][sound], quantize(out.f32[:total]).rows()[sound])
        return list(out.f32[:total].split(list(counts)))


class RowsLayer(RecurrentLayer[Heads], ABC):
    """A layer whose tokens are rows of one matrix."""

    @abstractmethod
    def step(
        self, parts: Sequence[torch.Tensor], slots: Sequence[int], drafts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Each part's rows as one sequence of the step, its state in its slot; the last of them are drafts."""


def check_that_chunks_change_no_bit(
    layer_of: Callable[[int], RowsLayer[Heads]], rows: torch.Tensor, other: torch.Tensor
) -> None:
    """Nor neighbours, threads and copies. layer_of: a new layer, by its number of threads; rows: 70 tokens each."""
    (whole,) = layer_of(1).step([rows], [0])
    for chunk in (1, 2, 33):
        layer = layer_of(3)
        got = []
        for first in range(0, 70, chunk):
            part = slice(first, first + chunk)
            got.append(layer.step([other[part], rows[part]], [2, 0])[1])
            if first == 33:  # a snapshot, and on from it
                layer.copy((0, 3), (2, 0), (3, 0))
        assert torch.equal(torch.cat(got), whole)


def check_that_drafts_move_no_state(
    layer_of: Callable[[int], RowsLayer[Heads]],
    texts: Sequence[torch.Tensor],
    wrong: torch.Tensor,
    most_accepted: int,
) -> None:
    """Whatever is drafted and rejected, outputs and states are those of rows without drafts, bit for bit. layer_of: as
    above; texts: two of 60 tokens."""
    whole = layer_of(1)
    expected = whole.step(texts, [0, 2])
    layer, rng = layer_of(3), random.Random(5)
    at, got = 0, list[list[torch.Tensor]](([], []))
    while at < 60:
        moved = min(rng.randint(0, most_accepted), 59 - at)
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
