"""Llama 4's tower (https://ai.meta.com/blog/llama-4-multimodal-intelligence/), which reads a picture tile by tile.

x = patches of a tile's pixels, times a matrix; and a class patch behind them
x = LayerNorm(x + learned positions)
x += attention(LayerNorm(x))       a tile's patches see each other; heads rotate by column and row, but not the class's
x += down(gelu(up(LayerNorm(x))))
tokens = fc(gelu(fc2(gelu(fc1(merge x merge patches of LayerNorm(x), joined)))))

The whole picture is one more tile, which follows the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import tiles_of
from moeserve.visualserver.shapes.layer_norm_sizes import QKV
from moeserve.visualserver.shapes.llama_4 import LlamaShape
from moeserve.visualserver.towers.axial import AxialTower, merge_order, pairs_in_split_halves
from moeserve.visualserver.towers.tower import CPU, SliceEnded
from moeserve.visualserver.towers.weights import InputFormat


class LlamaTower(AxialTower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: LlamaShape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        self._side = shape.tile  # pixels a side of the picture that `warm` encodes
        side = shape.tile // shape.patch
        self._order = merge_order(side, side, shape.merge).to(device)
        table = self.weights.pop("v.position_embd.weight")
        self._table = torch.cat([table[:-1][self._order], table[-1:]])
        self._class = self.weights.pop("v.class_embd")
        self._turns = self._turns_of(side)
        order = pairs_in_split_halves(shape.hidden, shape.heads).to(device)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            for name in QKV[:2]:
                self.weights.reorder(at + name, order)
            self.weights.join([at + name for name in QKV], at + "attn_qkv")

    def warm(self, max_tokens: int) -> int:
        """See `Tower`. Tiles are encoded one at a time, so all tiles need the memory of one."""
        return super().warm(1)

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        tiles = tiles_of(pixels, self.shape.tile)

        def within(number: int) -> SliceEnded:
            def ended(progress: float) -> None:
                if (whole := (number + progress) / len(tiles)) < 1.0:
                    slice_ended(whole)

            return ended

        return torch.cat([self._tile(tile, within(number)) for number, tile in enumerate(tiles)])

    def _tile(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        shape, product = self.shape, self.weights.product
        x = product("v.patch_embd", self._patches_of(pixels)[self._order], is_exact=True)
        x = self._layer_norm("v.pre_ln", torch.cat([x, self._class[None]]) + self._table, shape.eps)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            self._add_attention(at, x, shape.eps, self._turns)
            slice_ended((layer + 0.5) / shape.layers)
            self._add_perceptron(at, x, shape.eps)
            slice_ended((layer + 1) / shape.layers)
        x = self._joined(self._layer_norm("v.post_ln", x, shape.eps)[:-1])
        for name in ("mm.model.mlp.1", "mm.model.mlp.2"):
            x = functional.gelu(product(name, x, is_exact=True))
        return product("mm.model.fc", x, is_exact=True)

    def _turns_of(self, side: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin for a tile's patches, whose rows and columns count from 1, and for the class patch."""
        row, column = self._order // side, self._order % side
        angles = torch.stack((row + 1, column + 1), 1).double()[:, :, None] * self._inverse
        flat = functional.pad(angles.flatten(1), (0, 0, 0, 1))
        return flat.cos().float(), flat.sin().float()
