"""Uploads small arrays for a step through pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pinned_copy(array: NDArray[Any], device: torch.device) -> Tensor:
    """Launches a copy of the array to the device, and returns it, of the same shape and dtype. Work on the current
    stream may use it; `array` may be changed at once. From memory that is not pinned, the copy would wait for earlier
    launches."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def padded(ids: NDArray[np.int32], size: int) -> Tensor:
    """Returns int32 [size] on the host: the ids, followed by zeros."""
    out = torch.zeros(size, dtype=torch.int32)
    out[: len(ids)] = torch.from_numpy(np.ascontiguousarray(ids))
    return out
