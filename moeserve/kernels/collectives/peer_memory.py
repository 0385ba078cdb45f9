"""All-reduce for GPUs that can access each other's memory (NVLink, or peer-to-peer over PCIe)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from moeserve.kernels.collectives.push import MAX_NUMBERS, PushSum
from moeserve.kernels.collectives.sum_norm_op import MessageSize, SumNorm
from moeserve.kernels.launch import is_compiling_ahead

# Limits of PyTorch's kernels.
TYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16  # bytes that they read at a time


class OneShotSum:
    """Each GPU reads all other GPUs' numbers: PyTorch's one-shot kernel, on a copy in shared memory."""

    def __init__(self, shared: Tensor, group: dist.ProcessGroup) -> None:
        """shared: uint8, from `symmetric.empty`, the same size on every rank."""
        self._shared = shared
        self._group = group

    def takes(self, x: Tensor) -> bool:
        """Returns whether x can be summed: by its dtype, its alignment and the size of the shared memory."""
        is_possible = x.dtype in TYPES and x.nbytes % (ALIGNMENT * self._group.size()) == 0
        return is_possible and x.nbytes <= len(self._shared)

    def __call__(self, x: Tensor) -> None:
        if not is_compiling_ahead():
            flat, name = x.view(-1), self._group.group_name
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(self._here(flat), flat, "sum", name, flat)

    def try_once(self, x: Tensor) -> None:
        self(x)

    def _here(self, x: Tensor) -> Tensor:
        return self._shared.view(x.dtype)[: x.numel()]


class TwoShotSum(OneShotSum):
    """Each GPU sums a part of the numbers, which the others then read (two-shot): for large messages."""

    def __call__(self, x: Tensor) -> None:
        if not is_compiling_ahead():
            flat, here = x.view(-1), self._here(x.view(-1))
            here.copy_(flat)
            torch.ops.symm_mem.two_shot_all_reduce_(here, "sum", self._group.group_name)
            flat.copy_(here)


def peer_sums(
    group: dist.ProcessGroup, device: torch.device, most_bytes: int
) -> list[PushSum | OneShotSum | TwoShotSum]:
    """Returns all implementations for messages of up to `most_bytes`; every rank calls it. Raises RuntimeError if
    the GPUs cannot access each other's memory."""
    inbox = symmetric.empty(2, group.size(), MAX_NUMBERS, dtype=torch.int64, device=device).zero_()
    torch.cuda.synchronize(device)
    addresses = symmetric.rendezvous(inbox, group).buffer_ptrs
    shared = symmetric.empty(most_bytes, dtype=torch.uint8, device=device)
    symmetric.rendezvous(shared, group)
    push = PushSum(group.rank(), inbox, list(addresses))
    return [push, OneShotSum(shared, group), TwoShotSum(shared, group)]


def peer_sum_norm(
    group: dist.ProcessGroup, device: torch.device, rows: int, hidden: int, experts: int
) -> SumNorm:
    """Returns the fused sum and norm for steps of up to `rows` rows; every rank calls it. Raises RuntimeError if the
    GPUs cannot access each other's memory."""
    size = MessageSize(group.size(), rows, hidden, experts)
    region = symmetric.empty(size.region_bytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    return SumNorm(group.rank(), size, region, symmetric.rendezvous(region, group).buffer_ptrs)
