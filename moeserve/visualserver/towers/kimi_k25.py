"""MoonViT, the tower of Kimi-K2.5 (https://arxiv.org/abs/2602.02276), for still pictures.

x = patches of pixels, times a matrix, + learned positions
x += attention(LayerNorm(x))       all patches see each other; heads rotate by row and column
x += down(gelu(up(LayerNorm(x))))
tokens = fc2(gelu(fc1(merge x merge patches of LayerNorm(LayerNorm(x)), joined)))

The positions by time and the mean over frames concern videos only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.kimi_k25 import POSITIONS, KimiShape
from moeserve.visualserver.towers.axial import (
    AxialTower,
    bicubic_positions,
    merge_order,
    pairs_in_split_halves,
)
from moeserve.visualserver.towers.tower import CPU, SliceEnded
from moeserve.visualserver.towers.weights import InputFormat


class KimiTower(AxialTower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: KimiShape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        self._patches = self.weights.pop("v.patch_embd.weight").flatten(1)
        self._table = self.weights.pop(POSITIONS)
        q = pairs_in_split_halves(shape.hidden, shape.heads)
        order = torch.cat([q, shape.hidden + q, 2 * shape.hidden + torch.arange(shape.hidden)]).to(device)
        for layer in range(shape.layers):
            self.weights.reorder(f"v.blk.{layer}.attn_qkv", order)

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        shape, product = self.shape, self.weights.product
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        order = merge_order(rows, columns, shape.merge).to(self.device)
        x = functional.linear(
            self._patches_of(pixels)[order], self._patches, self.weights["v.patch_embd.bias"]
        )
        x += bicubic_positions(self._table, rows, columns)[order]
        turns = self._angles(columns, order)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            self._add_attention(at, x, shape.eps, turns)
            slice_ended((layer + 0.5) / shape.layers)
            self._add_perceptron(at, x, shape.eps, "tanh")
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        for name in ("v.post_ln", "mm.input_norm"):
            x = self._layer_norm(name, x, shape.eps)
        wide = functional.gelu(product("mm.1", self._joined(x), is_exact=True))
        return product("mm.2", wide, is_exact=True)
