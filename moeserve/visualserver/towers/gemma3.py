"""SigLIP (https://arxiv.org/abs/2303.15343), Gemma 3's tower.

x = patches of pixels, times a matrix, + learned positions
x += attention(LayerNorm(x))       all patches see each other; heads do not rotate
x += down(gelu(up(LayerNorm(x))))
tokens = projection(RMSNorm(the mean of merge x merge patches of LayerNorm(x)))
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.gemma3 import PROJECTION, Gemma3Shape
from moeserve.visualserver.shapes.layer_norm_sizes import QKV
from moeserve.visualserver.towers.layer_norm import LayerNormTower
from moeserve.visualserver.towers.tower import CPU, SliceEnded
from moeserve.visualserver.towers.weights import InputFormat


class Gemma3Tower(LayerNormTower):
    """See `Tower`. It can also encode pictures below the model's fixed size, as `warm` does on a CPU; their patches get
    the learned positions of the table's upper left corner."""

    def __init__(
        self,
        source: TensorSource,
        shape: Gemma3Shape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        if shape.is_swapped:
            self.up, self.down = self.down, self.up
        self._patches = self.weights.pop("v.patch_embd.weight").flatten(1)
        side = shape.side // shape.patch
        self._table = self.weights.pop("v.position_embd.weight").view(side, side, -1)
        self.weights.transpose(PROJECTION)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            self.weights.join([at + name for name in QKV], at + "attn_qkv")

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        shape = self.shape
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        x = functional.linear(self._patches_of(pixels), self._patches, self.weights["v.patch_embd.bias"])
        x += self._table[:rows, :columns].reshape(rows * columns, -1)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            self._add_attention(at, x, shape.eps, None)
            slice_ended((layer + 0.5) / shape.layers)
            self._add_perceptron(at, x, shape.eps, approximate="tanh")
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        x = self._layer_norm("v.post_ln", x, shape.eps)
        pooled = x.view(rows // shape.merge, shape.merge, columns // shape.merge, shape.merge, -1).mean(
            (1, 3)
        )
        norm = self.weights["mm.soft_emb_norm.weight"]
        tokens = functional.rms_norm(pooled.flatten(0, 1), norm.shape, norm, shape.eps)
        return self.weights.product(PROJECTION, tokens, is_exact=True)
