"""Converts tensors and settings of gated DeltaNets from checkpoints' form to GGUF's, for all families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .made_tensor import MadeTensor, find_tensor, floats_made, rows_made
from .safetensors_file import StoredTensor

UNDER = "linear_attn."  # prefix after "model.layers.N."

DELTA_KEYS: dict[str, tuple[str, ...]] = {
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "ssm.state_size": ("linear_key_head_dim",),
    n.SSM_VALUE_DIM: ("linear_value_head_dim",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "full_attention_interval": ("full_attention_interval",),
}
DELTA_LAYER: dict[str, str] = {
    n.bias_of_part(n.SSM_DT): f"{UNDER}dt_bias",
    n.of_part(n.SSM_NORM): f"{UNDER}norm.weight",
    n.of_part(n.SSM_OUT): f"{UNDER}out_proj.weight",
}
# All norms except the DeltaNet's.
LESS_ONE = frozenset(
    {
        n.OUTPUT_NORM,
        *map(n.of_part, (n.ATTN_NORM, n.POST_ATTENTION_NORM, n.ATTN_Q_NORM, n.ATTN_K_NORM, *n.NEXTN_NORMS)),
    }
)


def recurrent_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_types`, which overrides `full_attention_interval`. Raises
    ModelError."""
    types = config.get("layer_types")
    if types is None:
        return {}
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != config.get("num_hidden_layers"):
        raise SettingError(
            path, f"'layer_types' is {types!r}; one of {' and '.join(known)} a layer is expected"
        )
    unknown = next((each for each in types if each not in known), None)
    if unknown is not None:
        raise SettingError(path, f"'layer_types' has {unknown!r}; only {' and '.join(known)} are supported")
    return {"attention.recurrent_layers": np.array([each == known[0] for each in types])}


def made_tensors(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields the convolution and the decay of a recurrent layer, and removes their sources from `stored`."""
    if f"{prefix}{UNDER}A_log" not in stored:
        return
    conv = find_tensor(path, stored, f"{prefix}{UNDER}conv1d.weight", 3)
    channels, _, taps = conv.shape
    yield n.of_part(n.SSM_CONV1D), floats_made(conv, (channels, taps), lambda values: values)
    log = find_tensor(path, stored, f"{prefix}{UNDER}A_log", 1)
    yield n.SSM_A, floats_made(log, log.shape, lambda values: -np.exp(values))
    del stored[conv.name], stored[log.name]


def made_tensors_of_merged(
    path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields the same as `made_tensors`, and, from a merged matrix, the two matrices qkv and z. Per key head the merged
    matrix has the rows of q, k, and of its value heads' v and z. Removes that matrix from `stored`. Raises ModelError
    if its rows do not fit the heads."""
    yield from made_tensors(path, prefix, metadata, stored)
    name = f"{prefix}{UNDER}in_proj_qkvz.weight"
    if name not in stored:
        return
    matrix = find_tensor(path, stored, name, 2)
    architecture = metadata.require_str("general.architecture")
    key_heads, value_heads, key_dim, value_dim = (
        metadata.require_int(f"{architecture}.{key}", 1, 1024)
        for key in ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", n.SSM_VALUE_DIM)
    )
    values = value_heads * value_dim // key_heads  # per key head
    if matrix.shape[0] != (needed := key_heads * (2 * key_dim + 2 * values)):
        raise SettingError(
            path, f"tensor {name!r} has {matrix.shape[0]} rows, but config.json's heads need {needed}"
        )
    cuts = np.cumsum([0, key_dim, key_dim, values, values])

    def rows_of(*parts: int) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
        def choose(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
            heads = rows.reshape(key_heads, -1, rows.shape[-1])
            chosen = (heads[:, cuts[i] : cuts[i + 1]].reshape(-1, rows.shape[-1]) for i in parts)
            return np.concatenate(list(chosen))

        return choose

    cols = matrix.shape[1]
    qkv = (2 * key_heads * key_dim + key_heads * values, cols)
    yield n.of_part(n.ATTN_QKV), rows_made(matrix, qkv, rows_of(0, 1, 2))
    yield n.of_part(n.ATTN_GATE), rows_made(matrix, (key_heads * values, cols), rows_of(3))
    del stored[name]
