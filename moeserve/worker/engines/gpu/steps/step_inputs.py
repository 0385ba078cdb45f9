"""A step's rows on their way to the GPU: one pinned buffer, one copy (`step_columns.py` declares its columns).
Placeholders for tokens that are still being sampled are filled in on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.collectives.all_reduce import FromFirst
from moeserve.kernels.delta_net.op import SequenceDrafts, StepSequences, chunks_of
from moeserve.kernels.embed.op import take_sampled
from moeserve.kernels.embed.reference import EMBEDDED
from moeserve.models.blocks.gpu.lora import GpuAdapterRows
from moeserve.models.blocks.gpu.workspace import MIXED_DECODE_ROWS, GpuBatch, GpuStateRows
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.engines.gpu.steps.step_columns import (
    ALIGN,
    ColumnLayout,
    ColumnSizes,
    StepColumns,
    padded_columns,
)
from moeserve.worker.engines.gpu.steps.step_path import StepPath, sequences_alone
from moeserve.worker.engines.request_embeddings import EmbeddedStep
from moeserve.worker.sequences import Int32s, Sequences, StepLayout, first_drafts

PlaceDrafts = Callable[[Tensor, Tensor], None]

# Widths of `ColumnSizes` that count a step's rows.
ROW_WIDTHS = ("rows", "window_rows", "adapter_rows", "section_rows", "block_rows", "first_rows", "ahead_rows")


class StepInputs:
    """Inputs of steps of up to `size` rows, padded to `size`; a call of the head samples at most `head_rows` rows.

    A padding row has no KV slot and belongs to the request slot `dummy_slot`, the last one; a padding sequence has
    no rows.
    """

    def __init__(
        self,
        size: int,
        head_rows: int,
        dummy_slot: int,
        device: torch.device,
        *,
        max_model_len: int,
        num_kv_slots: int,
        has_states: bool = False,
        has_state_drafts: bool = False,
        has_adapters: bool = False,
        has_windows: bool = False,
        has_sections: bool = False,
        has_block: bool = False,
        index_block: int = 0,
        sees_ahead: bool = False,
        max_tiles: int = 0,
    ) -> None:
        """num_kv_slots: size of the smallest KV pool. max_tiles: tiles of a CUDA graph with prompts of this size.
        has_state_drafts: recurrent layers record drafts.
        has_adapters: rows may use adapters. has_windows: windowed layers have separate KV slots. has_sections: rows
        have three RoPE positions. has_block: a next-token block reads the rows. index_block: tokens of a block of keys,
        from which an indexer chooses; 0: none does. sees_ahead: rows of an embedding span see later rows of the
        span."""
        self.size = size
        self._head_rows = min(head_rows, size)
        self._dummy_slot = dummy_slot
        self._max_model_len, self._num_kv_slots = max_model_len, num_kv_slots
        self._max_sequences = min(size, dummy_slot)
        self._has_states, self._has_adapters, self._has_windows = has_states, has_adapters, has_windows
        self._has_sections, self._sees_ahead = has_sections, sees_ahead
        self._has_block_sections = has_sections and has_block
        self._index_block = index_block if has_sections else 0
        self._has_state_drafts = has_state_drafts
        layout = ColumnLayout(
            ColumnSizes(
                rows=size,
                sampled=size + self._head_rows,
                head_calls=-(-size // self._head_rows),
                mixed_calls=-(-size // MIXED_DECODE_ROWS),
                states=self._max_sequences * has_states,
                state_drafts=self._max_sequences * has_state_drafts,
                state_rows=size * has_states,
                window_rows=size * has_windows,
                adapter_rows=size * has_adapters,
                section_rows=size * has_sections,
                block_rows=size * self._has_block_sections,
                first_rows=size * bool(self._index_block),
                ahead_rows=size * sees_ahead,
                tiles=max_tiles,
            )
        )
        is_gpu = device.type == "cuda"
        self._pinned = torch.zeros(layout.num_ints, dtype=torch.int32, pin_memory=is_gpu)
        self._buffer = torch.zeros_like(self._pinned, device=device)
        self._host: StepColumns[Int32s] = layout.views(self._pinned.numpy())
        self._device: StepColumns[Tensor] = layout.views(self._buffer)
        self._copied = torch.cuda.Event() if is_gpu else None
        self._row_columns = [
            column for width in ROW_WIDTHS for column in padded_columns(self._host, width, dummy_slot)
        ]
        self._state_columns = list(padded_columns(self._host, "states", dummy_slot))
        self._draft_columns = list(padded_columns(self._host, "state_drafts", dummy_slot))
        self._num_sequences = 0
        self._awaits_tokens = False
        self._head_counts = [
            _number(self._device.head_rows, call) for call in range(-(-size // self._head_rows))
        ]
        self._decode_counts = tuple(
            _number(self._device.mixed_rows, call) for call in range(len(self._host.mixed_rows))
        )

    @property
    def token_ids(self) -> Tensor:
        """Returns the step's token ids on the device, int32 [size]."""
        return self._device.token_ids

    @property
    def num_rows(self) -> Tensor:
        """Returns the number of valid rows on the device, int32 [1]."""
        return _number(self._device.num_rows, 0)

    @property
    def max_tiles(self) -> int:
        return len(self._host.tiles)

    # ---------------------------------------------------------------- on the host

    def fill(self, layout: StepLayout, sequences: Sequences, embedded: EmbeddedStep | None = None) -> None:
        """Fills the host buffer with a step's rows, after waiting for the previous copy. embedded: None if its
        requests have tokens only."""
        embedded = embedded or EmbeddedStep.of_tokens(layout)
        n, m, c = layout.n, len(layout.sampled_rows), self._host
        self._begin(n)
        for call, first in enumerate(range(0, m, self._head_rows)):
            c.head_rows[call, 0] = min(m - first, self._head_rows)
        tokens = sequences.tokens[layout.sequence, layout.position]
        for first, rows, _ in embedded.spans:
            tokens[first : first + len(rows)] = 0  # 0, so that they do not count as awaited
        self._awaits_tokens = bool(tokens.min(initial=0) < 0)
        c.token_ids[:n] = tokens
        for first, rows, _ in embedded.spans:
            c.token_ids[first : first + len(rows)] = EMBEDDED
        c.positions[:n] = layout.position
        c.kv_slots[:n] = layout.kv_slots
        c.req_slots[:n] = layout.sequence
        c.sampled_rows[:m] = layout.sampled_rows
        c.sampled_slots[:m] = layout.sampled_slots
        if self._has_windows:
            c.window_slots[:n] = layout.window_slots
        if self._has_adapters:
            c.adapter_slots[:n] = sequences.adapters[layout.sequence]
        if self._has_sections:
            c.rotary_positions[:n] = _by_section(embedded.rotary_positions)
        if self._has_block_sections:
            before = embedded.before_positions
            before = layout.position - 1 if before is None else before
            c.rotary_before[:n] = np.maximum(_by_section(before), 0)
        if self._index_block:
            firsts = embedded.first_positions
            c.rotary_firsts[:n] = _by_section(self._first_of(layout.position) if firsts is None else firsts)
        if self._sees_ahead:
            c.ends[:n] = layout.position + 1 if embedded.ends is None else embedded.ends
        for values, padding in self._row_columns:
            values[n:] = padding
        if self._has_states:
            slots = sequences.state_slots[layout.req_slot]
            self._fill_sequences(layout.offset, layout.count, slots, layout.drafted)

    def _first_of(self, positions: Int32s) -> Int32s:
        """Returns the number of the first token of each position's block of keys."""
        firsts: Int32s = positions // self._index_block * self._index_block
        return firsts

    def clear(self) -> None:
        """Fills the buffer with padding only, for a step that is only captured."""
        self._begin(0)
        self._pinned.zero_()
        for values, padding in self._row_columns:
            values[:] = padding
        self._num_sequences = 0

    def fill_dummy(
        self, n: int, vocab: int, start: int = 0, *, is_prompt: bool = True, stores_kv: bool = True
    ) -> None:
        """Fills the buffer with n dummy rows, for timing before the first request: random tokens of one prompt in the
        dummy slot from position `start` on, or one token each of n sequences. Their KV goes to slots 0 .. n - 1, if
        `stores_kv`, their state to slot 0. If the step exceeds the request length, the last position is repeated; KV
        beyond the pool is not stored."""
        c, rows = self._host, np.arange(self.size)
        num_stored = min(n, self._num_kv_slots) if stores_kv else 0
        self._begin(n)
        c.token_ids[:] = np.random.default_rng(0).integers(0, vocab, self.size)
        c.positions[:] = np.minimum(start + rows, self._max_model_len - 1)
        c.kv_slots[:] = np.where(rows < num_stored, rows, -1)
        c.req_slots[:] = self._dummy_slot
        if self._has_windows:
            c.window_slots[:] = c.kv_slots
        if self._has_adapters:
            c.adapter_slots[:] = -1
        if self._has_sections:
            c.rotary_positions[:] = c.positions[:, None]
        if self._has_block_sections:
            c.rotary_before[:] = np.maximum(c.positions[:, None] - 1, 0)
        if self._index_block:
            c.rotary_firsts[:] = self._first_of(c.positions)[:, None]
        if self._sees_ahead:
            c.ends[:] = c.positions + 1
        if self._has_states:
            sequences = 1 if is_prompt else min(n, self._max_sequences)
            count = np.full(sequences, n if is_prompt else 1, np.int32)
            self._fill_sequences(np.arange(sequences, dtype=np.int32), count, np.zeros(sequences, np.int32))

    def fill_decode_rows(self, num_decode: int) -> None:
        """Divides a step with tiles, after `fill`: the first num_decode rows use decode attention, the others the
        tiles."""
        c = self._host
        firsts = MIXED_DECODE_ROWS * np.arange(len(c.mixed_rows), dtype=np.int32)
        c.mixed_rows[:, 0] = np.clip(num_decode - firsts, 0, MIXED_DECODE_ROWS)

    def fill_prompts(self, num_decode: int, tiles: Int32s) -> None:
        """Fills what a CUDA graph with prompts reads, after `fill`: `fill_decode_rows`, and the tiles."""
        self.fill_decode_rows(num_decode)
        c = self._host
        c.tiles[: len(tiles)] = tiles
        c.tiles[len(tiles) :] = 0

    def _begin(self, n: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        c = self._host
        c.num_rows[0, 0] = n
        c.head_rows[:] = 0
        c.mixed_rows[:] = 0
        self._awaits_tokens = False

    def _fill_sequences(
        self, offset: Int32s, count: Int32s, slot: Int32s, drafted: Int32s | None = None
    ) -> None:
        c, self._num_sequences = self._host, len(count)
        for (values, padding), filled in zip(self._state_columns, (offset, count, slot), strict=True):
            values[: len(count)] = filled
            values[len(count) :] = padding
        for values, padding in self._draft_columns:
            values[:] = padding
        if self._has_state_drafts and drafted is not None:
            c.draft_count[: len(count)], c.draft_first[: len(count)] = drafted, first_drafts(drafted)
        n = int(count.sum())
        c.row_sequence[:n] = np.repeat(np.arange(len(count), dtype=np.int32), count)

    # ---------------------------------------------------------------- on the device

    def copy(
        self,
        sampled: Tensor | None = None,
        from_first: FromFirst | None = None,
        place_drafts: PlaceDrafts | None = None,
    ) -> None:
        """Launches the copy of the host buffer to the device, then replaces tokens that are still being sampled.
        sampled: int32 [rows of the previous step's samples], on the device: that step's tokens, if some are awaited
        (`Sequences.expect`). from_first: broadcasts them from the first of several GPUs. place_drafts: called instead
        with token ids and count, if the awaited tokens are drafts."""
        self._buffer.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if self._awaits_tokens and place_drafts is not None:
            place_drafts(self.token_ids, self.num_rows)
        elif self._awaits_tokens:
            assert sampled is not None
            if from_first is not None:
                from_first(sampled)
            take_sampled(self.token_ids, sampled)

    def batch(self, path: StepPath, tiles: tuple[Tensor, ...] | None = None) -> GpuBatch:
        """Returns the step's rows for the model: see GpuBatch. tiles: int32, those of a path with tiles, after
        `fill_decode_rows` and `copy`; None: recurrent layers process each sequence token by token."""
        c = self._device
        states = None
        if self._has_states:
            states = self._recurrent_rows() if tiles is None else self._rows_by_chunks(path.num_decode)
        return GpuBatch(
            _number(c.num_rows, 0),
            c.token_ids,
            c.positions,
            c.kv_slots,
            c.req_slots,
            path.num_decode,
            tiles,
            path.is_independent,
            path.streamed,
            states,
            decode_counts=None if tiles is None else self._decode_counts,
            adapters=GpuAdapterRows(c.adapter_slots, path.scope) if path.scope else None,
            window_slots=c.window_slots if self._has_windows else None,
            rotary_positions=c.rotary_positions if self._has_sections else None,
            rotary_before=c.rotary_before if self._has_block_sections else None,
            rotary_firsts=c.rotary_firsts if self._index_block else None,
            ends=c.ends if self._sees_ahead else None,
            sees_ahead=path.sees_ahead,
        )

    def captured_batch(self, path: StepPath) -> GpuBatch:
        """Returns the batch that a CUDA graph is captured with. Graphs with prompts read on the device what
        `fill_prompts` wrote."""
        c = self._device
        if not path.has_tiles:
            return self.batch(path)
        return self.batch(path, (c.tiles,))

    def head(self, call: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the inputs of one call of the head, padded to `size`: rows, request slots, and count [1]."""
        c = self._device
        part = slice(call * self._head_rows, call * self._head_rows + size)
        return c.sampled_rows[part], c.sampled_slots[part], self._head_counts[call]

    @property
    def _sequences(self) -> StepSequences:
        c = self._device
        drafts = SequenceDrafts(c.draft_count, c.draft_first) if self._has_state_drafts else None
        return StepSequences(c.state_first, c.state_count, c.state_slots, c.row_sequence, drafts)

    def _recurrent_rows(self) -> GpuStateRows:
        """Returns rows that fit any step of this size, for capturing."""
        return GpuStateRows(self._sequences, self._max_sequences, None, None)

    def _rows_by_chunks(self, num_decode: int) -> GpuStateRows:
        """Returns the filled sequences; those after the first `num_decode` rows are processed in chunks."""
        counts = self._host.state_count[: self._num_sequences]
        num_alone = sequences_alone(counts, num_decode)
        part = slice(num_alone, self._num_sequences)
        first, count, slot = (values[part] for values, _ in self._state_columns)
        aligned = np.zeros((3, -(-len(first) // ALIGN) * ALIGN), np.int32)
        aligned[:, : len(first)] = first, count, slot
        device = self._buffer.device
        of_first, of_count, of_slot = pinned_copy(aligned, device)[:, : len(first)]
        chunked = StepSequences(of_first, of_count, of_slot, self._device.row_sequence)
        chunks = pinned_copy(chunks_of(first, count), device)
        return GpuStateRows(self._sequences, num_alone, chunked, chunks)


def _by_section(positions: Int32s) -> Int32s:
    """int32 [n, 3], or [n, 1] where all sections have the same; positions: int32 [3, n] or [n]."""
    return positions.T if positions.ndim == 2 else positions[:, None]


def _number(column: Tensor, index: int) -> Tensor:
    """int32 [1], at an aligned address."""
    return column[index, :1]
