"""What a sum over GPUs is, and torch.distributed's.

Each GPU ("rank") computes some heads and some experts, and holds the same residual stream. What a block adds to the
stream is therefore summed over all ranks, once after attention and once after the feed-forward. The sum's bits are the
same on every rank, so the ranks' routers choose the same experts.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from moeserve.kernels.launch import is_compiling_ahead


class AllReduce(Protocol):
    def __call__(self, x: Tensor) -> None:
        """x, contiguous, becomes the sum of all ranks' x. Launched on the current stream, in the same order on every
        rank; may be captured in a CUDA graph behind a first call. Within `compile_ahead` nothing runs."""
        ...


class FromFirst:
    """The first rank's numbers for all ranks, as a sum in which the others have zeros."""

    def __init__(self, all_reduce: AllReduce, rank: int) -> None:
        self._all_reduce = all_reduce
        self._rank = rank

    def __call__(self, x: Tensor) -> None:
        """As `AllReduce`. x: int32, numbers that are exact in float32."""
        if self._rank:
            x.zero_()
        self._all_reduce(x)


class ProcessGroupSum:
    """`AllReduce` by torch.distributed: NCCL, or gloo on a CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def takes(self, x: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor) -> None:
        if not is_compiling_ahead():
            dist.all_reduce(x, group=self._group)

    def try_once(self, x: Tensor) -> None:
        self(x)
