"""Reads experts stored as two tensors per layer in layouts other than transformers' own (`merged_experts.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n

from .made_tensor import MadeTensor, find_tensor, rows_made, values_made
from .safetensors_file import StoredTensor

_LINEAR = "block_sparse_moe."  # prefix after "model.layers.N."


def transposed_experts(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a layer's experts published as [expert, in, out] and removes them from `stored`. Experts in the layout
    of transformers' Qwen3-MoE stay there. Raises ModelError."""
    name = f"{prefix}mlp.experts.gate_up_proj"
    if name not in stored:
        return
    gate_up = find_tensor(path, stored, name, 3)
    down = find_tensor(path, stored, f"{prefix}mlp.experts.down_proj", 3)
    hidden = metadata.require_int(
        f"{metadata.require_str('general.architecture')}.embedding_length", 1, 1 << 16
    )
    experts, cols, rows = gate_up.shape
    is_qwen3s = rows == hidden and down.shape == (experts, hidden, cols // 2)
    if cols != hidden or is_qwen3s:
        return
    yield from _transposed_parts(path, gate_up, down)
    del stored[gate_up.name], stored[down.name]


def llama4_experts(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a layer's experts, which Llama 4's checkpoints have as [expert, in, out], and removes them from `stored`.
    Raises ModelError for a missing tensor and for shapes that do not fit one another."""
    del metadata
    under = f"{prefix}feed_forward.experts."
    if f"{under}gate_up_proj" not in stored:
        return
    gate_up = find_tensor(path, stored, f"{under}gate_up_proj", 3)
    down = find_tensor(path, stored, f"{under}down_proj", 3)
    yield from _transposed_parts(path, gate_up, down)
    del stored[gate_up.name], stored[down.name]


def _transposed_parts(
    path: Path, gate_up: StoredTensor, down: StoredTensor
) -> Iterator[tuple[str, MadeTensor]]:
    experts, hidden, rows = gate_up.shape
    if rows % 2 or down.shape != (experts, rows // 2, hidden):
        raise SettingError(path, f"tensors {gate_up.name!r} and {down.name!r} do not fit one another")
    for part, tensor, chosen, out, width in (
        (n.FFN_GATE_EXPS, gate_up, slice(None, rows // 2), rows // 2, hidden),
        (n.FFN_UP_EXPS, gate_up, slice(rows // 2, None), rows // 2, hidden),
        (n.FFN_DOWN_EXPS, down, slice(None), hidden, rows // 2),
    ):
        yield n.of_part(part), values_made(tensor, (experts, out, width), _transposed(chosen))


def _transposed(columns: slice) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    return lambda experts: experts[:, :, columns].transpose(0, 2, 1)


def linear_experts(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a layer's experts whose gate and up are one tensor, gate's rows first, and removes them from `stored`.
    Raises ModelError for a missing tensor and for shapes that do not fit one another."""
    gate_up = find_tensor(path, stored, f"{prefix}{_LINEAR}input_linear.weight", 3)
    down = find_tensor(path, stored, f"{prefix}{_LINEAR}output_linear.weight", 3)
    experts, rows, cols = gate_up.shape
    half = rows // 2
    shape = (experts, half, cols)
    yield n.of_part(n.FFN_GATE_EXPS), rows_made(gate_up, shape, lambda matrices: matrices[:, :half])
    yield n.of_part(n.FFN_UP_EXPS), rows_made(gate_up, shape, lambda matrices: matrices[:, half:])
    yield n.of_part(n.FFN_DOWN_EXPS), rows_made(down, down.shape, lambda matrices: matrices)
    del stored[gate_up.name], stored[down.name]


def linear_experts_and_shared(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Does the same as `linear_experts`, also for a shared expert in the same form. In a model without a router the
    shared expert is the feed-forward. Yields nothing for experts, or a shared expert, that the checkpoint lacks."""
    has_experts = any(name.startswith(f"{prefix}{_LINEAR}") for name in stored)
    if f"{prefix}{_LINEAR}input_linear.weight" in stored:
        yield from linear_experts(path, prefix, metadata, stored)
    if f"{prefix}shared_mlp.input_linear.weight" not in stored:
        return
    gate_up = find_tensor(path, stored, f"{prefix}shared_mlp.input_linear.weight", 2)
    down = find_tensor(path, stored, f"{prefix}shared_mlp.output_linear.weight", 2)
    half = gate_up.shape[0] // 2
    shape = (half, gate_up.shape[1])
    gate, up, out = n.SHARED_PARTS if has_experts else n.FFN_PARTS
    yield n.of_part(gate), rows_made(gate_up, shape, lambda rows: rows[:half])
    yield n.of_part(up), rows_made(gate_up, shape, lambda rows: rows[half:])
    yield n.of_part(out), rows_made(down, down.shape, lambda rows: rows)
    del stored[gate_up.name], stored[down.name]
