"""Next-token layers (MTP, `nextn`), which predict tokens further ahead; a file may have some after the ordinary
layers.

They are skipped, because without drafts their weights would only take memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

_NUMBER = re.compile(r"\.layers\.(\d+)\.")  # in a checkpoint's name of a tensor


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Next-token (MTP) layers that are not loaded. `count` and `num_bytes` are 0 if the file has no such tensors, even
    if its metadata mentions the layers."""

    count: int
    num_bytes: int  # in the file


def skipped_layers(shape: ModelShape, source: ModelSource) -> SkippedLayers:
    """Returns how many next-token (MTP) layers of the source are not loaded, and their bytes. The source must have
    passed `read_checked_shape`."""
    behind = {
        name: tensor.nbytes
        for name, tensor in source.tensors.items()
        if (n.layer_of(name) or 0) >= len(shape.loaded_layers)
    }
    numbers = {n.layer_of(name) for name in behind}
    numbers |= {int(found[1]) for name in source.skipped if (found := _NUMBER.search(name))}
    num_bytes = sum(behind.values()) + sum(source.skipped.values())
    return SkippedLayers(max(len(numbers), 1) if num_bytes else 0, num_bytes)
