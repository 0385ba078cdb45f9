"""A step's rows on their way to the GPU: one pinned buffer, one copy. What stands in the place of tokens that the host
does not know yet is completed there.

counts     [COUNTS]   the step's rows, then how many of them are sampled by each call of the head, and last how many
                      attend each by itself, MIXED_DECODE_ROWS together; 16 bytes apart, as kernels are compiled for
                      aligned addresses
then int32 [stride] each: token ids, positions, KV slots, request slots, sampled rows, their request slots; and where
there is recurrent state: of each sequence its first row, rows and state slot, and of each row its sequence; where
windowed layers have KV slots of their own, each row's; and where rows may ask for adapters, the adapter's slot of each
row
then int32 [tiles, 4]: of a recorded step, the tiles of its prompts (attention.op.prefill_tiles), empty ones behind
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.collectives.all_reduce import FromFirst
from moeserve.kernels.delta_net.op import StepSequences, chunks_of
from moeserve.kernels.embed.op import take_sampled
from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.lora import GpuAdapterRows
from moeserve.models.blocks.gpu.workspace import MIXED_DECODE_ROWS, GpuBatch, GpuStateRows
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

COUNTS = 160
_NUM_DECODE = 144  # behind the calls of the head: 32 of them are 8,192 rows
# Rows that attend by themselves beside prompts.
MAX_RECORDED_DECODE = (COUNTS - _NUM_DECODE) // 4 * MIXED_DECODE_ROWS
_FIELDS = 6
_STATE_FIELDS = 4
_ALIGN = 4  # int32s of 16 bytes


class StepInputs:
    """For steps of up to `size` rows, padded to that; at most `head_rows` rows are sampled by a call of the head.

    A row of padding has no KV slot and belongs to the request slot `nobody`, before which all others are; a sequence of
    padding has no rows.
    """

    def __init__(
        self,
        size: int,
        head_rows: int,
        nobody: int,
        device: torch.device,
        *,
        max_model_len: int,
        num_kv_slots: int,
        has_states: bool = False,
        has_adapters: bool = False,
        has_windows: bool = False,
        max_tiles: int = 0,
    ) -> None:
        """num_kv_slots: of the smallest KV pool. max_tiles: that a recorded step of this size has room for.
        has_adapters: rows may ask for some. has_windows: windowed layers have KV slots of their own."""
        head_rows = min(head_rows, size)
        stride = -(-(size + head_rows) // _ALIGN) * _ALIGN
        self._nobody = nobody
        self._max_model_len, self._num_kv_slots = max_model_len, num_kv_slots
        fields = _FIELDS + (_STATE_FIELDS if has_states else 0) + has_windows + has_adapters
        self._host = torch.zeros(
            COUNTS + fields * stride + 4 * max_tiles, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._device = torch.zeros_like(self._host, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._awaits_tokens = False
        end = COUNTS + fields * stride
        self._fields = self._host[COUNTS:end].view(fields, stride).numpy()
        self._tiles = self._host[end:].view(max_tiles, 4).numpy()
        self._counts = self._host[:COUNTS].numpy()
        on_device = self._device[COUNTS:end].view(fields, stride)
        self._tiles_on_device = self._device[end:].view(max_tiles, 4)
        self._decode_counts = tuple(self._device[at : at + 1] for at in range(_NUM_DECODE, COUNTS, _ALIGN))
        self.size = size
        self._head_rows = head_rows
        self.count = self._device[:1]
        self.token_ids, self.positions, self.kv_slots, self.req_slots = (f[:size] for f in on_device[:4])
        self._rows, self._slots = on_device[4:6]
        self._max_sequences = min(size, nobody)
        self._sequences: StepSequences | None = None
        if has_states:
            first, count, slot = (field[: self._max_sequences] for field in on_device[6:9])
            self._sequences = StepSequences(first, count, slot, on_device[9, :size])
        self._num_sequences = 0
        of_window = fields - 1 - has_adapters
        self._windows = self._fields[of_window, :size] if has_windows else None
        self._windows_on_device = on_device[of_window, :size]
        # Behind all others. -1: the model itself.
        self._adapters = self._fields[fields - 1, :size] if has_adapters else None
        self._adapters_on_device = on_device[fields - 1, :size]

    def fill(self, layout: StepLayout, sequences: Sequences) -> None:
        """On the host. Waits for the copy before."""
        if self._copied is not None:
            self._copied.synchronize()
        n, m = layout.n, len(layout.sampled_rows)
        self._counts[:] = 0
        self._counts[0] = n
        for call, first in enumerate(range(0, m, self._head_rows)):
            self._counts[_ALIGN * (1 + call)] = min(m - first, self._head_rows)
        f = self._fields
        f[0, :n] = tokens = sequences.tokens[layout.sequence, layout.position]
        self._awaits_tokens = bool(tokens.min(initial=0) < 0)
        f[1, :n] = layout.position
        f[2, :n] = layout.kv_slots
        f[3, :n] = layout.sequence
        f[0, n : self.size] = 0
        f[1, n : self.size] = 0
        f[2, n : self.size] = -1
        f[3, n : self.size] = self._nobody
        f[4, :m] = layout.sampled_rows
        f[5, :m] = layout.sampled_slots
        if self._windows is not None:
            self._windows[:n] = layout.window_slots
            self._windows[n:] = -1
        if self._adapters is not None:
            self._adapters[:n] = sequences.adapters[layout.sequence]
            self._adapters[n:] = -1
        if self._sequences is not None:
            self._fill_sequences(layout.offset, layout.count, sequences.state_slots[layout.req_slot])

    def clear(self) -> None:
        """No rows, for a step that only is to be recorded."""
        self._awaits_tokens = False
        self._counts[:] = 0
        f = self._fields
        f[:] = 0
        f[2, : self.size] = -1
        f[3, : self.size] = self._nobody
        if self._windows is not None:
            self._windows[:] = -1
        if self._adapters is not None:
            self._adapters[:] = -1
        self._num_sequences = 0
        self._tiles[:] = 0

    def fill_dummy(self, n: int, vocab: int, start: int = 0, *, is_prompt: bool = True) -> None:
        """n random tokens of a prompt that belongs to nobody, from position `start` on, or of n sequences, for timing,
        before there is any request: their KV goes to the slots 0 .. n - 1, their state to slot 0. The step may be
        larger than the KV pool and a request: then the last position is there several times, and what has no slot is
        not stored."""
        self._awaits_tokens = False
        self._counts[:] = 0
        self._counts[0] = n
        f = self._fields
        f[0, : self.size] = np.random.default_rng(0).integers(0, vocab, self.size)
        rows = np.arange(self.size)
        f[1, : self.size] = np.minimum(start + rows, self._max_model_len - 1)
        f[2, : self.size] = np.where(rows < min(n, self._num_kv_slots), rows, -1)
        f[3, : self.size] = self._nobody
        if self._windows is not None:
            self._windows[:] = f[2, : self.size]
        if self._adapters is not None:
            self._adapters[:] = -1
        if self._sequences is not None:
            sequences = 1 if is_prompt else min(n, self._max_sequences)
            count = np.full(sequences, n if is_prompt else 1, np.int32)
            self._fill_sequences(np.arange(sequences, dtype=np.int32), count, np.zeros(sequences, np.int32))

    def _fill_sequences(self, offset: Int32s, count: Int32s, slot: Int32s) -> None:
        f, self._num_sequences = self._fields, len(count)
        f[6:9] = 0
        f[6:9, : len(count)] = offset, count, slot
        n = int(count.sum())
        f[9, :n] = np.repeat(np.arange(len(count), dtype=np.int32), count)

    def fill_prompts(self, num_decode: int, tiles: Int32s) -> None:
        """Of a recorded step, behind `fill`: its first rows attend each by itself, the others in these tiles."""
        firsts = MIXED_DECODE_ROWS * np.arange(len(self._decode_counts), dtype=np.int32)
        self._counts[_NUM_DECODE::_ALIGN] = np.clip(num_decode - firsts, 0, MIXED_DECODE_ROWS)
        self._tiles[: len(tiles)] = tiles
        self._tiles[len(tiles) :] = 0

    @property
    def max_tiles(self) -> int:
        return len(self._tiles)

    def copy(self, sampled: Tensor | None = None, from_first: FromFirst | None = None) -> None:
        """Launches the copy to the device. sampled: int32, of the step before, where tokens of it are awaited
        (`Sequences.expect`); from_first: brings them from the first of several GPUs."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if self._awaits_tokens:
            assert sampled is not None
            if from_first is not None:
                from_first(sampled)
            take_sampled(self.token_ids, sampled)

    def batch(
        self,
        num_decode: int,
        tiles: tuple[Tensor, ...] | None,
        streamed: float,
        *,
        rows_independent: bool = False,
        scope: AdapterScope = AdapterScope.NONE,
    ) -> GpuBatch:
        """The step's rows for the model; see GpuBatch. Without tiles, all rows go through the recurrent rule. scope: of
        the adapters that they ask for."""
        states = None
        if self._sequences is not None:
            states = self._recurrent_rows() if tiles is None else self._rows_by_chunks(num_decode)
        return GpuBatch(
            self.count,
            self.token_ids,
            self.positions,
            self.kv_slots,
            self.req_slots,
            num_decode,
            tiles,
            rows_independent,
            streamed,
            states,
            adapters=GpuAdapterRows(self._adapters_on_device, scope) if scope else None,
            window_slots=None if self._windows is None else self._windows_on_device,
        )

    def recorded_prompts(self, scope: AdapterScope) -> GpuBatch:
        """The batch of a recorded step with prompts: what `fill_prompts` says is read on the device."""
        tiles = (self._tiles_on_device,)
        batch = self.batch(min(self.size, MAX_RECORDED_DECODE), tiles, 0.0, scope=scope)
        return replace(batch, decode_counts=self._decode_counts)

    def _recurrent_rows(self) -> GpuStateRows:
        """Of any step of this size: it may be recorded."""
        assert self._sequences is not None
        return GpuStateRows(self._sequences, self._max_sequences, None, None)

    def _rows_by_chunks(self, num_decode: int) -> GpuStateRows:
        """Of the sequences last filled in, those behind the first `num_decode`."""
        assert self._sequences is not None
        first, count, slot = self._fields[6:9, num_decode : self._num_sequences]
        aligned = np.zeros((3, -(-len(first) // _ALIGN) * _ALIGN), np.int32)
        aligned[:, : len(first)] = first, count, slot
        device = self._device.device
        of_first, of_count, of_slot = pinned_copy(aligned, device)[:, : len(first)]
        chunked = StepSequences(of_first, of_count, of_slot, self._sequences.row_sequence)
        chunks = pinned_copy(chunks_of(first, count), device)
        return GpuStateRows(self._sequences, num_decode, chunked, chunks)

    def head(self, call: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a call of the head, padded to `size`: rows, request slots, and count [1]."""
        first = call * self._head_rows
        at = _ALIGN * (1 + call)
        part = slice(first, first + size)
        return self._rows[part], self._slots[part], self._device[at : at + 1]
