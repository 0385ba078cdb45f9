"""A Hugging Face folder's float tensors and settings as a GGUF file, with the keys alone that GGUF files have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from moeserve.models.open import open_folder
from moeserve.models.sources.gguf import names as n

# Our own, of what a GGUF says by its tensors.
_OWN = (
    n.HAS_QKV_BIAS,
    n.DENSE_LAYERS,
    n.YARN_TRUNCATE,
    n.VALUES_FROM_KEYS,
    n.UNROTATED_LAYERS,
    n.HAS_QK_NORM,
)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    ordered: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]] = lambda name, rows: rows,
    named: Callable[[str], str] = str,
    without: tuple[str, ...] = (),
    **settings: Any,
) -> None:
    """ordered: gives a tensor's rows in the order of the file. named: gives its name in the file. without: keys to
    leave out. settings: further keys.
    Keys are without the architecture; "__" in a setting's name stands for a dot."""
    source = open_folder(folder)
    writer = GGUFWriter(path, source.architecture)
    for key, value in source.metadata.items():
        if key == "general.architecture" or key.removeprefix(f"{source.architecture}.") in (*_OWN, *without):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
    for key, setting in settings.items():
        writer.add_uint32(f"{source.architecture}.{key.replace('__', '.')}", setting)
    for name, tensor in source.tensors.items():
        raw = ordered(name, source.data(name).reshape(*tensor.shape[:-1], -1))
        writer.add_tensor(named(name), raw, raw_dtype=GGMLQuantizationType(tensor.type.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
