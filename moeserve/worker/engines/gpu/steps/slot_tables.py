"""The block tables on a GPU: the KV slot of each request slot's positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.messages.steps import NewSeq
from moeserve.worker.sequences import Int32s


class SlotTables:
    """The tables that attention reads: int32 [max_num_seqs + 1, max_model_len]; the last row belongs to the dummy
    slot. The first kernel of a step writes the entries of its rows, this class all others."""

    def __init__(self, slots: Tensor, windows: Tensor | None = None, ahead: Tensor | None = None) -> None:
        """ahead: a view of the memory of slots, at each position the slot of the next one. windows: table of the
        sliding-window layers if they have separate KV slots; only the last positions'
        entries are valid."""
        self.slots = slots
        self.windows = windows
        self.ahead = ahead
        self._all = [slots] if windows is None else [slots, windows]

    @classmethod
    def empty(cls, requests: int, length: int, device: torch.device, *, has_windows: bool) -> SlotTables:
        """Returns tables for this many request slots, including the dummy slot."""
        numbers = torch.zeros(requests * length + 1, dtype=torch.int32, device=device)
        slots, ahead = numbers[:-1].view(requests, length), numbers[1:].view(requests, length)
        windows = torch.zeros_like(slots) if has_windows else None
        return cls(slots, windows, ahead)

    def bind(self, seq: NewSeq) -> None:
        if not seq.prefix_slots:
            return
        prefix = torch.frombuffer(bytearray(seq.prefix_slots), dtype=torch.int32)
        self.slots[seq.req_slot, : len(prefix)].copy_(prefix)
        if self.windows is not None and seq.prefix_window_slots:
            last = torch.frombuffer(bytearray(seq.prefix_window_slots), dtype=torch.int32)
            first = len(prefix) - len(last)
            self.windows[seq.req_slot, :first] = 0  # as in `Sequences.bind`
            self.windows[seq.req_slot, first : len(prefix)].copy_(last)

    def fork(self, targets: Int32s, sources: Int32s, end: int) -> None:
        """Takes the result of `Sequences.fork`."""
        if not len(targets):
            return
        device = self.slots.device
        into, of = (torch.from_numpy(slots.astype(np.int64)).to(device) for slots in (targets, sources))
        for table in self._all:
            table[into, :end] = table[of, :end]

    def forget(self, req_slots: Sequence[int]) -> None:
        """Resets these rows, and the dummy slot's, to their state before the first step."""
        for table in self._all:
            table[list(req_slots)] = 0
            table[-1] = 0

    def spread_dummy_slot(self, num_kv_slots: int, num_window_slots: int) -> None:
        """Maps the dummy slot's positions to all KV slots in turn, as for a real prompt; reading the same slot for
        every position would be several times slower. For timing; `forget` undoes it."""
        positions = torch.arange(self.slots.shape[1], dtype=torch.int32, device=self.slots.device)
        for table, count in zip(self._all, (num_kv_slots, num_window_slots), strict=False):
            table[-1] = positions % count
