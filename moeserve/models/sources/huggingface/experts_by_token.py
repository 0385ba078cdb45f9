"""DeepSeek-V4's tables of experts by token id, whose numbers take 64 bits in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.quantization.table import I32

from .made_tensor import MadeTensor, bytes_of, find_part
from .safetensors_file import StoredTensor, stored_numbers


def made_tensors(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a layer's table of experts by token id, if it has one. Renames the norm of keys `attn.norm` in `stored` to
    `attn.kv_norm`. Raises ModelError for a table that is not of integers."""
    norm = f"{prefix}attn.norm.weight"
    if norm in stored:
        stored[f"{prefix}attn.kv_norm.weight"] = stored.pop(norm)
    name = f"{prefix}ffn.gate.tid2eid"
    if name in stored:
        table = find_part(path, stored, name, ("I64", "I32"))
        del stored[name]
        made = MadeTensor(table.shape, I32, (table,), lambda: bytes_of(_narrow(path, table)))
        yield n.of_part(n.EXPERTS_BY_TOKEN), made


def _narrow(path: Path, table: StoredTensor) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the table in 32 bits. The engine checks that its numbers are experts."""
    numbers = stored_numbers(table)
    if numbers.size and numbers.max() > np.iinfo(np.int32).max:
        raise ModelError(
            path, f"tensor {table.name!r} has numbers that are not expert ids; download it again"
        )
    return numbers.astype(np.int32)
