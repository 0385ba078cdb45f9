"""Routes and weights for tests of the GPU's experts."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)


def random_ids(n: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(n)]).int()


def widened(values: torch.Tensor) -> torch.Tensor:
    """The same values as the first columns of a tensor with two more."""
    wide = torch.full(
        (len(values), values.shape[1] + 2, *values.shape[2:]), 77, dtype=values.dtype, device=DEVICE
    )
    wide[:, : values.shape[1]] = values.to(DEVICE)
    return wide[:, : values.shape[1]]
