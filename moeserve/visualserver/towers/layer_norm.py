"""The base of towers whose layers are

x += attention(LayerNorm(x))
x += down(gelu(up(LayerNorm(x))))

with biases.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.shape import PixelScale, TowerShape
from moeserve.visualserver.towers.tower import Tower
from moeserve.visualserver.towers.weights import InputFormat


class LayerNormShape(TowerShape, Protocol):
    @property
    def heads(self) -> int: ...

    @property
    def merge(self) -> int:
        """Patches a side of the square that becomes one token."""
        ...

    @property
    def pixels(self) -> PixelScale: ...


class LayerNormTower(Tower):
    """See `Tower`."""

    up, down = "ffn_up", "ffn_down"  # names of a layer's products

    def __init__(
        self,
        source: TensorSource,
        shape: LayerNormShape,
        device: torch.device,
        inputs: InputFormat | None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self._sizes = shape
        deviation = torch.tensor(shape.pixels.deviation, dtype=torch.float64)
        mean = torch.tensor(shape.pixels.mean, dtype=torch.float64)
        self._scale = (255.0 * deviation).float().to(device)
        self._shift = (mean / deviation).float().to(device)

    def _patches_of(self, pixels: Tensor) -> Tensor:
        """Returns float32 [patches, 3 * patch * patch], patches row by row. A patch's numbers are in the order channel,
        row, column."""
        side = self._sizes.patch
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        scaled = pixels.float() / self._scale - self._shift
        return scaled.view(rows, side, columns, side, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)

    def _perceptron(self, at: str, x: Tensor, eps: float, approximate: str = "none") -> Tensor:
        """Returns down(gelu(up(LayerNorm(x)))) of a layer. approximate: see torch's `gelu`."""
        wide = self.weights.product(at + self.up, self._layer_norm(at + "ln2", x, eps))
        wide = functional.gelu(wide, approximate=approximate)
        return self.weights.product(at + self.down, wide)

    def _layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        w = self.weights
        return functional.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)
