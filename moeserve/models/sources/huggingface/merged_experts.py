"""Experts stored as two tensors per layer, as in transformers 5 and Qwen3.5:

gate_up_proj [E, 2 * ff, hidden], gate's rows first, and down_proj [E, hidden, ff]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n

from .made_tensor import MadeTensor, find_tensor, rows_made
from .safetensors_file import StoredTensor


def merged_experts(
    path: Path, prefix: str, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a layer's experts by GGUF's names, if stored in this form, and removes them from `stored`. prefix:
    "model.layers.3.mlp.experts.". Raises ModelError for missing tensors or another form."""
    if f"{prefix}gate_up_proj" not in stored:
        return
    gate_up = find_tensor(path, stored, f"{prefix}gate_up_proj", 3)
    down = find_tensor(path, stored, f"{prefix}down_proj", 3)
    experts, rows, cols = gate_up.shape
    if rows % 2:
        raise SettingError(
            path, f"tensor {gate_up.name!r} has {rows} rows; as many of gate as of up are expected"
        )
    half = rows // 2
    yield n.of_part(n.FFN_GATE_EXPS), rows_made(gate_up, (experts, half, cols), _rows(slice(None, half)))
    yield n.of_part(n.FFN_UP_EXPS), rows_made(gate_up, (experts, half, cols), _rows(slice(half, None)))
    yield n.of_part(n.FFN_DOWN_EXPS), rows_made(down, down.shape, _rows(slice(None)))
    del stored[gate_up.name], stored[down.name]


def _rows(rows: slice) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    return lambda experts: experts[:, rows]
