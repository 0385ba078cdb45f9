"""Measures the RAM of towers in a process of its own. Prints for the weights, and for each tower, format and size of a
picture, the bytes that the plan counts and those by which the process's memory rises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from moeserve.kernels.block_float import has_block_float
from moeserve.visualserver.shapes.gemma3 import Gemma3Shape
from moeserve.visualserver.shapes.gemma4 import Gemma4Shape
from moeserve.visualserver.shapes.glm4v import GlmShape
from moeserve.visualserver.shapes.kimi_k25 import KimiShape
from moeserve.visualserver.shapes.llama_4 import LlamaShape
from moeserve.visualserver.shapes.minimax_m3 import MiniMaxShape
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.shapes.shape import PixelScale
from moeserve.visualserver.tower_file import AnyTowerShape
from moeserve.visualserver.tower_memory import cpu_bytes, picture_bytes
from moeserve.visualserver.towers.load import make_tower
from moeserve.visualserver.towers.tower import CPU
from moeserve.visualserver.towers.weights import InputFormat

_SCALE: Final = PixelScale((0.5,) * 3, (0.5,) * 3)
# The published towers' proportions at a third of the width.
_COMMON: Final[dict[str, Any]] = {"hidden": 384, "heads": 6, "layers": 1, "ffn": 1440, "output": 640}
SHAPES: Final[dict[str, AnyTowerShape]] = {
    "qwen": Qwen3VlShape(**_COMMON, patch=16, merge=2, positions=24),
    "qwen with DeepStack": Qwen3VlShape(**_COMMON, patch=16, merge=2, positions=24, deep=(0,)),
    "siglip": Gemma3Shape(
        **_COMMON, patch=14, merge=2, side=28 * 50, eps=1e-6, pixels=_SCALE, is_swapped=False
    ),
    "gemma": Gemma4Shape(
        **_COMMON, patch=16, merge=3, positions=256, eps=1e-6, is_standardized=True, is_clamped=False
    ),
    "gemma, clamped": Gemma4Shape(
        **_COMMON, patch=16, merge=3, positions=256, eps=1e-6, is_standardized=False, is_clamped=True
    ),
    "glm": GlmShape(
        hidden=384, heads=6, layers=1, patch=14, merge=2, output=1024, merger_ffn=2736, positions=24, eps=1e-5,
        pixels=_SCALE,
    ),
    "kimi": KimiShape(**_COMMON, patch=14, merge=2, positions=(64, 64), eps=1e-5, pixels=_SCALE),
    "llama": LlamaShape(
        **_COMMON, patch=14, merge=2, tile=896, adapter=(1024, 1024), eps=1e-5, pixels=_SCALE
    ),
    "minimax": MiniMaxShape(
        **_COMMON | {"output": 1440}, patch=14, merge=2, inner=1440, eps=1e-5, pixels=_SCALE
    ),
}  # fmt: skip
SIZES: Final = ((20, 20), (8, 50))  # tokens: rows and columns


class Source:
    """Random tensors of a shape, in float32."""

    path = Path("random")

    def __init__(self, shape: AnyTowerShape) -> None:
        self.tensors = {
            name: SimpleNamespace(type=0, shape=size) for name, size in shape.tensor_shapes().items()
        }

    def data(self, name: str) -> Any:
        size = self.tensors[name].shape
        return np.random.default_rng(1).standard_normal(size, np.float32).view(np.uint8).reshape(-1)

    def advise_done(self, name: str) -> None:
        """There is no file."""


def _status(key: str) -> int:
    """Returns a number of bytes of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _raised(tower: Any, rows: int, columns: int, side: int) -> int:
    """Returns the bytes by which encoding raises the peak."""
    pixels = np.random.default_rng(2).integers(0, 256, (rows * side, columns * side, 3), np.uint8)
    before = _status("VmRSS:") - pixels.nbytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    tower.encode(pixels)
    return _status("VmHWM:") - before


def _weights(inputs: InputFormat) -> list[Any]:
    """Loads a tower of 30 layers, and packs its weights with a picture of 16 tokens."""
    is_block_float = inputs is InputFormat.BLOCK_FLOAT
    shape = Qwen3VlShape(**_COMMON | {"layers": 30}, patch=16, merge=2, positions=24)
    before = _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    tower: Any = make_tower(Source(shape), shape, CPU, inputs)  # type: ignore[arg-type]
    tower.encode(np.zeros((4 * shape.token_side, 4 * shape.token_side, 3), np.uint8))
    planned = cpu_bytes(shape, 0, is_block_float=is_block_float)
    return [f"weights, {inputs.name}", planned, _status("VmHWM:") - before]


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for name, shape in SHAPES.items():
        for inputs in (InputFormat.FLOAT32, InputFormat.BLOCK_FLOAT):
            is_block_float = inputs is InputFormat.BLOCK_FLOAT
            if is_block_float and not has_block_float():
                continue
            tower: Any = make_tower(Source(shape), shape, CPU, inputs)  # type: ignore[arg-type]
            tiles = [(64, 32)] if isinstance(shape, LlamaShape) else SIZES
            _raised(tower, *tiles[0], shape.token_side)  # libraries make their buffers
            for rows, columns in tiles:
                raised = _raised(tower, rows, columns, shape.token_side)
                planned = picture_bytes(shape, rows * columns, is_block_float=is_block_float)
                found.append([f"{name}, {inputs.name}, {rows} x {columns}", planned, raised])
    found += map(_weights, [InputFormat.FLOAT32] + [InputFormat.BLOCK_FLOAT] * has_block_float())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
