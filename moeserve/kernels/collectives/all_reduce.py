"""The interface of sums over GPUs, and torch.distributed's implementation.

Each GPU ("rank") computes some heads and some experts, and holds the same residual stream. So the output of each
block is summed over all ranks, once after attention and once after the feed-forward. The result is bitwise equal on
all ranks, so their routers choose the same experts.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from moeserve.kernels.launch import is_compiling_ahead


class AllReduce(Protocol):
    def __call__(self, x: Tensor) -> None:
        """Replaces x (contiguous) by the sum of all ranks' x. Launched on the current stream, in the same order on
        every rank. May be captured in a CUDA graph after a first call. Inside `compile_ahead` nothing is executed."""
        ...


class FromFirst:
    """Broadcasts the first rank's numbers, as a sum in which the other ranks contribute zeros."""

    def __init__(self, all_reduce: AllReduce, rank: int) -> None:
        self._all_reduce = all_reduce
        self._rank = rank

    def __call__(self, x: Tensor) -> None:
        """Replaces x by the first rank's x, in place. x: int32, contiguous, with numbers that float32 has exactly.
        To be called as an `AllReduce`."""
        if self._rank:
            x.zero_()
        self._all_reduce(x)


class ProcessGroupSum:
    """`AllReduce` by torch.distributed: NCCL, or gloo on a CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def takes(self, x: Tensor) -> bool:
        """Returns whether x can be summed: always."""
        return True

    def __call__(self, x: Tensor) -> None:
        if not is_compiling_ahead():
            dist.all_reduce(x, group=self._group)

    def try_once(self, x: Tensor) -> None:
        self(x)
