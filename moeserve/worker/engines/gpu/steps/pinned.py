"""Small arrays on their way to the GPU beside a step's inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pinned_copy(array: NDArray[Any], device: torch.device) -> Tensor:
    """On the device, by a copy that does not wait for what was launched before, as it would from memory that is not
    pinned."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def padded(ids: NDArray[np.int32], size: int) -> Tensor:
    """int32 [size], on the host: the ids, then zeros."""
    out = torch.zeros(size, dtype=torch.int32)
    out[: len(ids)] = torch.from_numpy(np.ascontiguousarray(ids))
    return out
