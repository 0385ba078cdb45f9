"""Small steps repeat the operations of an earlier step with as many rows.

A step launches some ten operations a layer, and each launch checks its operands. If the caches hold the model, a step
waits longer for these launches than for the pool's work. So the first step of each number of rows is recorded, with its
token ids, positions and KV slots in buffers that stay in place. A later step writes these buffers and launches all the
recorded operations with one call. Attention plans are built for each step, also in place; a few operations are launched
only for certain plans, so these have records of their own (`PlanKinds`). With states, only steps with a single row for
each sequence are repeated: they differ only in their state slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.operation_queue import Recorded
from moeserve.kernels.stream_operands import KvLayer, StateLayer, StateSequences
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.cpu.compressed import CompressedPlans
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.workspace import CpuBatch
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm

# A record takes about 0.5 KB for each operation: for 48 layers 5 MB in all, and as much for each `PlanKinds` that
# occurs: at most three with one rule of choice, four with compressed attention. With more rows, launches take a smaller
# part of a step.
MOST_ROWS: Final = 16
MOST_SLOTS: Final = (1 << 31) - 1


class PlanKinds(NamedTuple):
    """The facts that decide which operations a step's plans launch: for each plan, which rows choose keys."""

    chooses: tuple[bool, ...]
    others: tuple[bool, ...]  # whether some rows attend to all keys, or keys are copied to their rings


def plan_kinds(forms: Mapping[AttentionForm, CpuForm], compressed: CompressedPlans | None) -> PlanKinds:
    """Returns the kinds of the plans as they are built now."""
    if compressed is not None:
        return PlanKinds(*compressed.kinds)
    plans = [plan for form in forms.values() for rule, plan in form.plans.items() if rule.top]
    return PlanKinds(tuple(plan.chooses for plan in plans), tuple(plan.has_tiles for plan in plans))


class RepeatedSteps:
    """The records of a decoder's steps, and the buffers that they read. Only one step may be under way, and the pool
    must be idle when it begins."""

    def __init__(
        self,
        shape: ModelShape,
        stream: CpuStream,
        kv: Sequence[KvLayer],
        states: Sequence[StateLayer],
        forms: Mapping[AttentionForm, CpuForm],
        vocab: int,
    ) -> None:
        """kv, states, forms: those of the decoder. vocab: number of rows of the embedding."""
        self._stream = stream
        self._vocab = vocab
        self._num_positions = min(len(form.cos) for form in forms.values())
        slots: dict[bool, list[int]] = {False: [], True: []}
        for layer, pool in zip(shape.layers, kv, strict=False):
            # A layer that reads another's keys has none.
            if layer.attention is not None and pool.num_slots and pool.block == 1:
                is_windowed = isinstance(layer.attention, AttentionShape) and layer.attention.window > 0
                slots[is_windowed].append(pool.num_slots)
        every = slots[False] + slots[True]
        self._num_slots = min(every, default=MOST_SLOTS)
        # Where windowed layers have slots of their own.
        self._num_full_slots = min(slots[False] or every, default=MOST_SLOTS)
        self._num_window_slots = min(slots[True] or every, default=MOST_SLOTS)
        # Where only the slots of blocks' last tokens have rows: their number, by the tokens of a block.
        blocks = {pool.block for pool in kv} - {1}
        self._entry_rows = {b: min(pool.num_slots for pool in kv if pool.block == b) for b in blocks}
        self._has_states = len(states) > 0
        self._num_states = min((len(layer.states) for layer in states), default=0)
        self._ids, self._positions, self._kv_slots, self._windows, self._state_slots = (
            torch.zeros(MOST_ROWS, dtype=torch.int32) for _ in range(5)
        )
        # Of sequences of one row each.
        self._rows = torch.arange(MOST_ROWS, dtype=torch.int32)
        self._counts = torch.ones(MOST_ROWS, dtype=torch.int32)
        self._records: dict[Hashable, Recorded] = {}

    def tokens(self, token_ids: Tensor) -> Tensor:
        """Begins a step: returns its token ids, int32 [n], in the buffer. Raises IndexError for ids out of range."""
        if not self._stream.is_idle:
            self._stream.wait()
        self._stream.put_ids("token id", token_ids, self._ids, self._vocab)
        return self._ids[: len(token_ids)]

    def takes(self, batch: CpuBatch) -> bool:
        """Returns whether `batch` can be put into the buffers. `tokens` must have been called for it."""
        if self._has_states:
            states = batch.states
            if states is None or states.drafts is not None or len(states.slot) != batch.n:
                return False
            if len(set(states.slot.tolist())) != batch.n:
                return False  # whose launch is refused
        return batch.first_positions is None and batch.positions.dim() == 1

    def batch(self, batch: CpuBatch) -> CpuBatch:
        """Returns the batch with its positions and slots in the buffers. Raises IndexError for any out of range."""
        n, windows, stream = batch.n, batch.window_slots, self._stream
        stream.put_ids("position", batch.positions, self._positions, self._num_positions)
        num_slots = self._num_slots if windows is None else self._num_full_slots
        stream.put_ids("KV slot", batch.kv_slots, self._kv_slots, num_slots)
        for block, rows in self._entry_rows.items():
            ends = batch.kv_slots[(batch.positions + 1) % block == 0]
            if len(ends) and int(ends.max()) >= rows:
                raise IndexError(f"an entry's KV slot {int(ends.max())} is not in [0, {rows})")
        if windows is not None:
            stream.put_ids("KV slot", windows, self._windows, self._num_window_slots)
            windows = self._windows[:n]
        states = None
        if self._has_states and batch.states is not None:
            stream.put_ids("state slot", batch.states.slot, self._state_slots, self._num_states)
            states = StateSequences(self._rows[:n], self._counts[:n], self._state_slots[:n])
        return CpuBatch(
            n,
            self._positions[:n],
            self._kv_slots[:n],
            states,
            window_slots=windows,
            has_window_plan=batch.has_window_plan,
        )

    def launch(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launches the operations recorded under `key`; if there are none, calls `launch` and records its
        operations."""
        recorded = self._records.get(key)
        if recorded is None or not self._stream.repeat(recorded):
            self._records[key] = self._stream.record(launch)
