"""A tower of Qwen3-VL's of any size with random weights, as an mmproj file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from gguf import GGUFWriter

from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape

# Qwen3.6-35B-A3B's.
QWEN36: Final = Qwen3VlShape(
    hidden=1152, heads=16, layers=27, ffn=4304, patch=16, merge=2, output=2048, positions=48
)


def write_random_tower(
    path: Path, shape: Qwen3VlShape, seed: int = 5, factors: Mapping[str, float] = MappingProxyType({})
) -> Path:
    """Matrices are float16 where they fit; outputs of products have about the size of their inputs. factors: of tensors
    whose names contain these words."""
    rng, writer = np.random.default_rng(seed), GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    numbers = {
        "projection_dim": shape.output, "patch_size": shape.patch, "embedding_length": shape.hidden,
        "block_count": shape.layers, "feed_forward_length": shape.ffn, "attention.head_count": shape.heads,
        "spatial_merge_size": shape.merge,
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    for name, size in shape.tensor_shapes().items():
        values = rng.standard_normal(size, np.float32)
        if len(size) == 1:
            values = 0.1 * values + ("ln" in name and name.endswith("weight"))
        else:
            values /= np.sqrt(np.prod(size[1:]))
        for word, factor in factors.items():
            if word in name:
                values *= np.float32(factor)
        is_half = len(size) > 1 and np.abs(values).max() < np.finfo(np.float16).max
        writer.add_tensor(name, values.astype(np.float16 if is_half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
