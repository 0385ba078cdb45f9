"""RAM that a GPU copies from and to in the background, pinned where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MAPPED = 2  # cudaHostRegisterMapped: kernels read it too


def pin(memory: Tensor) -> int:
    """memory: contiguous, any type. Returns its address, for `unpin`, which must come before the memory goes: the
    allocator may hand the addresses out again. Raises RuntimeError where it cannot be pinned. Meanwhile the driver
    holds up what is given to the GPU, longer where pages of the memory have not been written to."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _MAPPED)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: error {int(error)}")
    return memory.data_ptr()


def unpin(addresses: Sequence[int]) -> None:
    torch.cuda.synchronize()
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
