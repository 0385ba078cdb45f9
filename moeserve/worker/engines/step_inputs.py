"""A step's rows on their way to the GPU: one pinned buffer, one copy.

counts     [COUNTS]   the step's rows, then how many of them are sampled by each call of the head; 16 bytes apart,
                      as kernels are compiled for aligned addresses
then int32 [stride] each: token ids, positions, KV slots, request slots, sampled rows, their request slots
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.worker.sequences import Sequences, StepLayout

COUNTS = 128
_FIELDS = 6
_ALIGN = 4  # int32s of 16 bytes


class StepInputs:
    """For steps of up to `size` rows, padded to that; at most `head_rows` rows are sampled by a call of the head.

    A row of padding has no KV slot and belongs to the request slot `nobody`.
    """

    def __init__(self, size: int, head_rows: int, nobody: int, device: torch.device) -> None:
        stride = -(-(size + head_rows) // _ALIGN) * _ALIGN
        self._nobody = nobody
        self._host = torch.zeros(
            COUNTS + _FIELDS * stride, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._device = torch.zeros_like(self._host, device=device)
        self._fields = self._host[COUNTS:].view(_FIELDS, stride).numpy()
        self._counts = self._host[:COUNTS].numpy()
        on_device = self._device[COUNTS:].view(_FIELDS, stride)
        self.size = size
        self._head_rows = head_rows
        self.count = self._device[:1]
        self.token_ids, self.positions, self.kv_slots, self.req_slots = (f[:size] for f in on_device[:4])
        self._rows, self._slots = on_device[4:]

    def fill(self, layout: StepLayout, sequences: Sequences) -> None:
        """On the host; the copy before must have been made."""
        n, m = layout.n, len(layout.sampled_rows)
        self._counts[:] = 0
        self._counts[0] = n
        for call, first in enumerate(range(0, m, self._head_rows)):
            self._counts[_ALIGN * (1 + call)] = min(m - first, self._head_rows)
        f = self._fields
        f[0, :n] = sequences.tokens[layout.sequence, layout.position]
        f[1, :n] = layout.position
        f[2, :n] = layout.kv_slots
        f[3, :n] = layout.sequence
        f[0, n : self.size] = 0
        f[1, n : self.size] = 0
        f[2, n : self.size] = -1
        f[3, n : self.size] = self._nobody
        f[4, :m] = layout.sampled_rows
        f[5, :m] = layout.sampled_slots

    def fill_dummy(self, n: int, vocab: int) -> None:
        """A prompt of n random tokens that belongs to nobody, for timing, before there is any request: all its KV goes
        to slot 0."""
        self._counts[:] = 0
        self._counts[0] = n
        f = self._fields
        f[0, : self.size] = np.random.default_rng(0).integers(0, vocab, self.size)
        f[1, : self.size] = np.arange(self.size)
        f[2, : self.size] = 0
        f[3, : self.size] = self._nobody

    def copy(self) -> None:
        """Launches the copy to the device."""
        self._device.copy_(self._host, non_blocking=True)

    def batch(
        self, num_decode: int, tiles: Tensor | None, streamed: float, *, rows_independent: bool = False
    ) -> GpuBatch:
        """The step's rows for the model; see GpuBatch."""
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
        )

    def head(self, call: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a call of the head, padded to `size`: rows, request slots, and count [1]."""
        first = call * self._head_rows
        at = _ALIGN * (1 + call)
        part = slice(first, first + size)
        return self._rows[part], self._slots[part], self._device[at : at + 1]
