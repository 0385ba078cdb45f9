"""Qwen3-VL's tower (https://arxiv.org/abs/2511.21631); Qwen3.5's and 3.6's are the same without DeepStack.

x = patches of pixels, times a matrix, + learned positions
x += attention(LayerNorm(x))       all patches see each other; q and k rotate by row and column
x += down(gelu(up(LayerNorm(x))))
tokens = mm.2(gelu(mm.0(merge x merge patches of LayerNorm(x), joined)))
         and, for each layer of DeepStack, fc2(gelu(fc1(LayerNorm(merge x merge patches of x behind it, joined))))
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.towers.axial import AxialTower, merge_order
from moeserve.visualserver.towers.tower import CPU, SliceEnded
from moeserve.visualserver.towers.weights import InputFormat

EPS: Final = 1e-6  # of LayerNorm; the file's key has the text model's value


class Qwen3VlTower(AxialTower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: Qwen3VlShape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        self._frames = self._frame_patches()

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        """Returns rows that consist of the embedding and, for each layer of DeepStack, the numbers that are added in a
        layer of the text model."""
        shape, product = self.shape, self.weights.product
        rows, columns = (side // shape.patch for side in pixels.shape[-3:-1])
        order = merge_order(rows, columns, shape.merge).to(self.device)
        x = self._embedded(pixels, order)
        x += self._positions(rows, columns)[order]
        turns = self._angles(columns, order)
        deep = []
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            self._add_attention(at, x, EPS, turns)
            slice_ended((layer + 0.5) / shape.layers)
            self._add_perceptron(at, x, EPS, "tanh")
            if layer in shape.deep:
                at = f"v.deepstack.{layer}."
                joined = self._norm(at + "norm", self._joined(x))
                deep.append(product(at + "fc2", functional.gelu(product(at + "fc1", joined))))
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        joined = self._joined(self._norm("v.post_ln", x))
        tokens = product("mm.2", functional.gelu(product("mm.0", joined, is_exact=True)), is_exact=True)
        return torch.cat([tokens, *deep], dim=1)

    def _embedded(self, pixels: Tensor, order: Tensor) -> Tensor:
        """pixels: a picture, or two frames of a video. Returns [patches, hidden] in the order `order`."""
        first, second = self._frames
        bias = self.weights["v.patch_embd.bias"]
        if pixels.dim() == 3:
            return functional.linear(self._patches_of(pixels)[order], first + second, bias)
        earlier, later = (self._patches_of(frame)[order] for frame in pixels)
        return functional.linear(earlier, first, bias).addmm_(later, second.T)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Returns the learned table, resampled bilinearly with its corners at the picture's corners: [patches, hidden],
        row by row."""
        side = self.shape.positions
        table = self.weights["v.position_embd.weight"].view(1, side, side, -1).permute(0, 3, 1, 2)
        grid = functional.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)
        return grid[0].permute(1, 2, 0).reshape(rows * columns, -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self._layer_norm(name, x, EPS)
