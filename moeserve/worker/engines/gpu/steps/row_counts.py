"""Rows of a step as the recorded sizes have them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeserve.worker.sequences import Int32s


def rounded(n: int, sizes: list[int]) -> int:
    """The smallest of the sizes, ascending, that n rows fit."""
    return next(size for size in sizes if size >= n)


def leading_ones(counts: Int32s) -> int:
    """How many of the first counts are 1."""
    longer = np.flatnonzero(counts > 1)
    return int(longer[0]) if len(longer) else len(counts)


def padded(ids: Int32s, size: int) -> Tensor:
    """int32 [size]: the ids, then zeros."""
    out = torch.zeros(size, dtype=torch.int32)
    out[: len(ids)] = torch.from_numpy(np.ascontiguousarray(ids))
    return out
