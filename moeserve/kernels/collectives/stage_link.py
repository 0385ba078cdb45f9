"""Sends rows from GPU to GPU in pipeline parallelism: a ring, whose last GPU sends to the first.

A message contains some rows of a step's residual stream, written at their offset in the next GPU's inbox. Send and
receive run on the current stream, in the same order on both sides, and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from moeserve.kernels.launch import is_compiling_ahead

SIGNAL = 0  # the channel of PyTorch's signals reserved for a link
# Waits have no time limit; the leader's watch ends a group whose rank has died.
TIMEOUT_MS = 0


class StageLink(Protocol):
    """One GPU's link from the previous and to the next rank."""

    @property
    def inbox(self) -> Tensor:
        """Returns float32 [rows, hidden]: the received rows."""
        ...

    @property
    def is_one_sided(self) -> bool:
        """True if sending does not wait for the receiver, so that several messages can be in flight."""
        ...

    def send(self, x: Tensor, row: int, *, more: bool = False) -> None:
        """Sends x, float32 [n, hidden], to the next rank's inbox from row `row` on. The sender must know that the
        receiver no longer needs the old contents. more: these rows are received together with the rows of the next
        call."""
        ...

    def receive(self, *parts: tuple[int, int]) -> None:
        """Waits for rows of the previous rank, as (first row, count): all parts sent up to the first `send` without
        `more`."""
        ...


class PeerLink:
    """A link by writes into the next GPU's memory: a copy and a signal per message."""

    is_one_sided = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rows: int, hidden: int) -> None:
        """Every rank calls it. Raises RuntimeError if the GPUs cannot access each other's memory."""
        self.inbox: Tensor = symmetric.empty(rows, hidden, dtype=torch.float32, device=device)
        self._handle = symmetric.rendezvous(self.inbox, group)
        self._before = (group.rank() - 1) % group.size()
        self._next = (group.rank() + 1) % group.size()
        self._outbox = self._handle.get_buffer(self._next, (rows, hidden), torch.float32)

    def send(self, x: Tensor, row: int, *, more: bool = False) -> None:
        if is_compiling_ahead():
            return
        self._outbox[row : row + len(x)].copy_(x)
        if not more:
            self._handle.put_signal(self._next, SIGNAL, TIMEOUT_MS)

    def receive(self, *parts: tuple[int, int]) -> None:
        if not is_compiling_ahead():
            self._handle.wait_signal(self._before, SIGNAL, TIMEOUT_MS)


class ProcessGroupLink:
    """A link by torch.distributed: NCCL (through the host if necessary), or gloo on a CPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rows: int, hidden: int) -> None:
        self.inbox: Tensor = torch.zeros(rows, hidden, device=device)
        self.is_one_sided = device.type == "cpu"
        self._before = (group.rank() - 1) % group.size()
        self._next = (group.rank() + 1) % group.size()
        self._sent: list[tuple[dist.Work, Tensor]] = []  # gloo's sends in progress, with their data

    def send(self, x: Tensor, row: int, *, more: bool = False) -> None:
        if is_compiling_ahead():
            return
        if not self.is_one_sided:
            dist.send(x, self._next)
            return
        self._sent = [(work, rows) for work, rows in self._sent if not work.is_completed()]
        copy = x.clone()  # x may be overwritten by the next launch
        work = dist.isend(copy, self._next)
        assert work is not None
        self._sent.append((work, copy))

    def receive(self, *parts: tuple[int, int]) -> None:
        if is_compiling_ahead():
            return
        for row, count in parts:
            dist.recv(self.inbox[row : row + count], self._before)
