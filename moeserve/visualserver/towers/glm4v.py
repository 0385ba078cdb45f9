"""The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V (https://arxiv.org/abs/2507.01006), for still pictures.

x = norm(patches of pixels, times a matrix) + learned positions
x += attention(norm(x))            all patches see each other; heads rotate by row and column
x += down(silu(gate(norm(x))) * up(norm(x)))
y = fc(merge x merge patches of norm(x), joined by a convolution)
tokens = down(silu(gate(z)) * up(z)), z = gelu(LayerNorm(y))

norm is RMSNorm.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.glm4v import GlmShape
from moeserve.visualserver.towers.axial import AxialTower, bicubic_positions, merge_order
from moeserve.visualserver.towers.tower import CPU, SliceEnded
from moeserve.visualserver.towers.weights import InputFormat

MERGER_EPS: Final = 1e-5  # of its LayerNorm


class GlmTower(AxialTower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: GlmShape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        self._patches = self._still_patches()
        self._table = self.weights.pop("v.position_embd.weight").view(shape.positions, shape.positions, -1)
        # Reorders the matrix's columns: a row of joined patches has one patch after another; the file has one channel
        # after another.
        merger = self.weights.pop("mm.patch_merger.weight").permute(0, 2, 3, 1)
        self._merger = merger.reshape(shape.output, -1).contiguous()

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        shape = self.shape
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        order = merge_order(rows, columns, shape.merge).to(self.device)
        x = functional.linear(
            self._patches_of(pixels)[order], self._patches, self.weights["v.patch_embd.bias"]
        )
        x = self._norm("v.norm_embd", x)
        x += bicubic_positions(self._table, rows, columns)[order]
        turns = self._angles(columns, order)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            x += self._attend(at, self._norm(at + "ln1", x), turns)
            slice_ended((layer + 0.5) / shape.layers)
            x += self._feed_forward(at + "ffn_", self._norm(at + "ln2", x))
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        joined = self._joined(self._norm("v.post_ln", x))
        y = functional.linear(joined, self._merger, self.weights["mm.patch_merger.bias"])
        y = self.weights.product("mm.model.fc", y, is_exact=True)
        return self._feed_forward("mm.", functional.gelu(self._layer_norm("mm.post_norm", y, MERGER_EPS)))

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        gate = functional.silu(self.weights.product(at + "gate", x))
        gate *= self.weights.product(at + "up", x)
        return self.weights.product(at + "down", gate)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.shape.eps)
