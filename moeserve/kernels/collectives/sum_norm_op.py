"""Launches the all-reduce fused with the following norm. Specification: the sum, followed by `norm.op.add_norm` or
`routing.op.norm_router`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.collectives.inboxes import Inboxes, padded
from moeserve.kernels.collectives.sum_norm import sum_norm_kernel, sum_norm_router_kernel
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.norm.op import norm_warps
from moeserve.kernels.routing.op import experts_at_once

WORD_ROWS = 64  # up to this number of rows is sent as words, in float32
ROUTER_ROWS = (1, 2, 4, 8)  # rows of a small batch; its router's product is in the same kernel
MAX_BYTES = 64 << 20  # of a message sent as rows; every other GPU has room for twice this
ROW_TYPE = torch.bfloat16  # dtype of rows; a single one, because other sizes would overlap them
TRIAL_POLLS = 1 << 20  # about a second


@dataclass(frozen=True, slots=True)
class MessageSize:
    """The sizes that determine a `SumNorm`'s messages."""

    ranks: int
    rows: int  # of the largest step
    hidden: int
    experts: int  # of a router

    @property
    def capacity(self) -> int:
        """Rows of the largest message that is sent as rows."""
        return max(1, min(self.rows, MAX_BYTES // (self.hidden * ROW_TYPE.itemsize)))

    @property
    def region_bytes(self) -> int:
        """Bytes of the memory that the other ranks write to."""
        words = [2 * self.ranks * n * self.hidden * torch.int64.itemsize for n in (WORD_ROWS, *ROUTER_ROWS)]
        rows = 2 * (self.ranks - 1) * self.capacity
        as_rows = [rows * torch.int32.itemsize, rows * self.hidden * ROW_TYPE.itemsize]
        return sum(padded(nbytes) for nbytes in words + as_rows)


class SumNorm:
    """Sums partial sums of up to `rows` rows of `hidden` numbers, fused with their norm. Every rank makes the same
    calls in the same order."""

    def __init__(self, rank: int, size: MessageSize, region: Tensor, addresses: Sequence[int]) -> None:
        """region: uint8 [size.region_bytes], zeros, writable by all ranks; addresses: of all ranks' regions."""
        self._rank = rank
        self._ranks = ranks = size.ranks
        self._hidden = hidden = size.hidden
        self._experts = size.experts
        self._capacity = size.capacity
        inboxes, device = Inboxes(region, addresses), region.device
        self._words = inboxes.take(2 * ranks * WORD_ROWS * hidden, torch.int64)
        self._routed = {n: inboxes.take(2 * ranks * n * hidden, torch.int64) for n in ROUTER_ROWS}
        slots = 2 * (ranks - 1)
        self._flags = inboxes.take(slots * self._capacity, torch.int32)
        self._rows = inboxes.take(slots * self._capacity * hidden, ROW_TYPE)
        self._totals = {n: torch.zeros(n, hidden, device=device) for n in ROUTER_ROWS}
        self._word_calls, self._row_calls, *router_calls = (
            torch.zeros(programs, dtype=torch.int32, device=device)
            for programs in (WORD_ROWS, self._capacity, *(n * self._tiles(n) for n in ROUTER_ROWS))
        )
        self._router_calls = dict(zip(ROUTER_ROWS, router_calls, strict=True))
        self._chosen: set[int] = set()
        self._is_trial = False

    def fits(self, own: Tensor) -> bool:
        """Returns whether own, floats [n, .., hidden], has a supported size."""
        if len(own) <= WORD_ROWS:
            return own.dtype == torch.float32
        return own.dtype == ROW_TYPE and len(own) <= self._capacity

    def choose(self, own: Tensor) -> None:
        """Makes `takes()` return true for batches with as many rows as `own` [rows, hidden] has."""
        self._chosen.add(len(own))

    def takes(self, own: Tensor) -> bool:
        """Returns whether a batch `own` [rows, hidden] should be summed and normalised by this kernel: `choose` chose
        its number of rows, and it fits."""
        return len(own) in self._chosen and self.fits(own)

    def trial(self, is_trial: bool) -> None:
        """While is_trial is true, calls terminate with wrong sums even if no data arrives from the other GPUs."""
        self._is_trial = is_trial

    def add_norm(
        self,
        own: Tensor,
        x: Tensor,
        count: Tensor,
        weight: Tensor,
        eps: float,
        y: GpuActivations,
        exact: Tensor | None = None,
        *,
        attended: Tensor | None = None,
    ) -> None:
        """Computes x[i] += attended[i] + the sum of all ranks' own[i]; y[i] = RMSNorm(x[i]) * weight, for i <
        count[0]. Arguments as for `norm.op.add_norm`; own [n, 1, hidden], of a size that `fits`. eps: added to the
        mean square under the norm's root."""
        n = len(own)
        is_words = n <= WORD_ROWS
        inbox, calls = (self._words, self._word_calls) if is_words else (self._rows, self._row_calls)
        flags = None if is_words else self._flags
        size = next_power_of_2(self._hidden)
        sum_norm_kernel(
            (n,), own, inbox.here, None if flags is None else flags.here, inbox.peers,
            None if flags is None else flags.peers, calls, x, attended, count, weight, y.x, y.codes, y.scales, exact,
            self._hidden, (WORD_ROWS if is_words else self._capacity) * self._hidden, self._capacity,
            self._rank, self._ranks, self._polls, eps, size, pdl(), num_warps=norm_warps(size), launch_pdl=pdl(),
        )  # fmt: skip

    def norm_router(
        self,
        own: Tensor,
        x: Tensor,
        count: Tensor,
        weight: Tensor,
        eps: float,
        router: Tensor,
        y: GpuActivations,
        logits: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """Computes, for rows i < count[0], sum[i] = own[i] summed over all ranks, kept in `total(n)`; y[i] =
        RMSNorm(x[i] + sum[i]) * weight; logits[i] = router y[i] + bias. own float32 [n, 1, hidden], where ROUTER_ROWS
        has n; other arguments as for `routing.op.norm_router`. eps: added to the mean square under the norm's root.
        Raises ValueError for logits that are not [n, experts]."""
        n, inbox = len(own), self._routed[len(own)]
        if logits.shape != (n, self._experts):
            raise ValueError(f"logits {tuple(logits.shape)} where ({n}, {self._experts}) are expected")
        at_once = experts_at_once(n)
        sum_norm_router_kernel(
            (n, self._tiles(n)), own, inbox.here, inbox.peers, self._router_calls[n], x, self._totals[n], count, weight,
            router, bias, y.x, y.codes, y.scales, logits,
            self._hidden, n * self._hidden, self._rank, self._ranks, self._polls, self._experts,
            next_power_of_2(self._hidden), at_once, eps, pdl(),
            num_warps=4 if at_once <= 2 else 8, launch_pdl=pdl(),
        )  # fmt: skip

    def total(self, rows: int) -> Tensor:
        """Returns float32 [rows, hidden]: the last sum of `norm_router`."""
        return self._totals[rows]

    @property
    def _polls(self) -> int:
        return TRIAL_POLLS if self._is_trial else 0

    def _tiles(self, rows: int) -> int:
        return -(-self._experts // experts_at_once(rows))
