"""The specification of the adapters' products, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # A [rank, cols] and B [rows, rank], multiplied by the adapter's scale


def add_adapters(x: Tensor, adapters: Tensor, pairs: Sequence[Pair | None], out: Tensor) -> Tensor:
    """Returns out[t] + B A x[t] with the matrices of adapters[t]; out[t] for rows with -1 or without matrices.

    x: float32 [n, cols]; adapters: [n]; out: [n, rows].
    """
    result = out.clone()
    for row, adapter in enumerate(adapters.tolist()):
        pair = pairs[adapter] if adapter >= 0 else None
        if pair is not None:
            result[row] += pair[1] @ (pair[0] @ x[row])
    return result


def to_panels(pair: Pair) -> Pair:
    """Returns A and B in the CPU kernels' layout: the rank padded with zeros to a multiple of 4; B as [panels, rank,
    32]."""
    a, b = pair
    rank = -len(a) % 4 + len(a)
    panels = -(-len(b) // 32)
    padded_a = torch.zeros(rank, a.shape[1])
    padded_a[: len(a)] = a
    padded_b = torch.zeros(panels * 32, rank)
    padded_b[: len(b), : b.shape[1]] = b
    return padded_a, padded_b.view(panels, 32, rank).transpose(1, 2).contiguous()
