"""Some layers of a GGUF file as a model by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type

from moeserve.models.open import open_model
from moeserve.models.sources.gguf import names as n

TOKENS = "tokenizer.ggml.tokens"


def write_layers(model: Path, path: Path, layers: Sequence[int]) -> Path:
    """Writes these layers of `model`, numbered from 0, with embedding and head; of the tokenizer only the tokens. Lists
    of the metadata with an entry for each layer keep those entries."""
    source = open_model(model)
    count = source.metadata.require_int(f"{source.architecture}.block_count", 1, 1 << 16)
    writer = GGUFWriter(path, source.architecture)
    for key, value in source.metadata.items():
        if key.startswith(f"{source.architecture}."):
            _add(writer, key, value, count, layers)
    tokens = source.metadata.require_strings(TOKENS)
    writer.add_array(TOKENS, [token.decode("utf-8", "replace") for token in tokens])
    for name, tensor in source.tensors.items():
        layer = n.layer_of(name)
        if layer is None or layer in layers:
            renamed = (
                name if layer is None else name.replace(f"blk.{layer}.", f"blk.{layers.index(layer)}.", 1)
            )
            data = source.data(name).reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(renamed, data.copy(), raw_dtype=Type(int(tensor.type)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any, count: int, layers: Sequence[int]) -> None:
    if key.endswith(".block_count"):
        writer.add_uint32(key, len(layers))
    elif isinstance(value, np.ndarray):
        entries = value.tolist()
        writer.add_array(key, [entries[layer] for layer in layers] if len(entries) == count else entries)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
