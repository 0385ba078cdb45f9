"""Weights of the norms of q and k that a GGUF has as tensors, and a checkpoint as one number, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.quantization.table import F32

from .made_tensor import MadeTensor, bytes_of


def scaled_head_norms(key: str) -> Callable[[Metadata], Iterator[tuple[str, MadeTensor]]]:
    """Returns a function that yields each layer's norms of q and k, float32 [head width]: all numbers of q's are the
    one under `<architecture>.<key>` of the metadata, those of k's are 1."""

    def made(metadata: Metadata) -> Iterator[tuple[str, MadeTensor]]:
        name = metadata.require_str("general.architecture")
        dim = metadata.require_int(f"{name}.attention.key_length", 2, 1024)
        scale = metadata.require_float(f"{name}.{key}", 1e-6, 1e6)
        for layer in range(metadata.require_int(f"{name}.block_count", 1, 1024)):
            yield n.of_layer(layer, n.ATTN_Q_NORM), _same(scale, dim)
            yield n.of_layer(layer, n.ATTN_K_NORM), _same(1.0, dim)

    return made


def _same(value: float, dim: int) -> MadeTensor:
    return MadeTensor((dim,), F32, (), lambda: bytes_of(np.full(dim, value, np.float32)))
