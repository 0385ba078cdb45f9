"""A picture's patches as the processors of Qwen's kind give them to transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moeserve.visualserver.towers.axial import merge_order


def processed(
    pixels: np.ndarray, mean: Sequence[float], deviation: Sequence[float], patch: int, merge: int
) -> dict[str, Any]:
    """Returns what a model takes for pixels uint8 [height, width, 3]: patches of `patch` pixels a side, each at both
    times, those of a token (`merge` a side) one after another."""
    scaled = (torch.from_numpy(pixels) / 255 - torch.tensor(mean)) / torch.tensor(deviation)
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    patches = (
        scaled.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, 1, -1)
    )
    twice = patches[merge_order(rows, columns, merge)].expand(-1, -1, 2, -1).reshape(rows * columns, -1)
    return {"pixel_values": twice, "image_grid_thw": torch.tensor([[1, rows, columns]])}
