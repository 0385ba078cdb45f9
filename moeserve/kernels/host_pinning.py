"""Pins existing RAM, so that a GPU can copy from and to it in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MAPPED = 2  # cudaHostRegisterMapped: kernels read it too


def pin(memory: Tensor) -> int:
    """Pins memory (contiguous, any dtype). Returns its address for `unpin`, which must be called before the memory
    is freed, as the allocator may reuse the addresses. Raises RuntimeError if it cannot be pinned. The driver delays
    GPU work meanwhile, longer if pages of the memory were never written."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _MAPPED)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: error {int(error)}")
    return memory.data_ptr()


def unpin(addresses: Sequence[int]) -> None:
    torch.cuda.synchronize()
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
