"""How rows go from GPU to GPU where each has some of the layers: a ring, whose last GPU sends to the first.

A message is some rows of a step's residual stream, at their place in the next GPU's inbox. It is sent and received on
the current stream, in the same order on both sides, and may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from moeserve.kernels.launch import is_compiling_ahead

SIGNAL = 0  # the channel of PyTorch's signals that a link has to itself
# A signal is waited for as long as it takes: the leader's watch ends a group whose rank has gone.
TIMEOUT_MS = 0


class StageLink(Protocol):
    """One GPU's two ends: from the rank before, and to the next."""

    @property
    def inbox(self) -> Tensor:
        """float32 [rows, hidden]: what has been received."""
        ...

    @property
    def is_one_sided(self) -> bool:
        """A message leaves without the other side's waiting for it, so that several may be under way."""
        ...

    def send(self, x: Tensor, row: int, *, more: bool = False) -> None:
        """x, float32 [n, hidden], becomes the rows from `row` on of the next rank's inbox. Who sends must know that the
        other side is done with what was there. more: the next call's rows are received together with these."""
        ...

    def receive(self, *parts: tuple[int, int]) -> None:
        """Waits for the next rows from the rank before: those of each `send` up to one without `more`, each as (first
        row, how many)."""
        ...


class PeerLink:
    """By writing into the next GPU's memory. A message is a copy and a signal."""

    is_one_sided = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rows: int, hidden: int) -> None:
        """Every rank calls it. RuntimeError where the GPUs do not reach one another's memory."""
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
    """By torch.distributed: NCCL, which goes through the host where it must, or gloo on a CPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rows: int, hidden: int) -> None:
        self.inbox: Tensor = torch.zeros(rows, hidden, device=device)
        self.is_one_sided = device.type == "cpu"
        self._before = (group.rank() - 1) % group.size()
        self._next = (group.rank() + 1) % group.size()
        self._sent: list[tuple[dist.Work, Tensor]] = []  # by gloo, until they have been received

    def send(self, x: Tensor, row: int, *, more: bool = False) -> None:
        if is_compiling_ahead():
            return
        if not self.is_one_sided:
            dist.send(x, self._next)
            return
        self._sent = [(work, rows) for work, rows in self._sent if not work.is_completed()]
        copy = x.clone()  # x is the next launch's
        work = dist.isend(copy, self._next)
        assert work is not None
        self._sent.append((work, copy))

    def receive(self, *parts: tuple[int, int]) -> None:
        if is_compiling_ahead():
            return
        for row, count in parts:
            dist.recv(self.inbox[row : row + count], self._before)
