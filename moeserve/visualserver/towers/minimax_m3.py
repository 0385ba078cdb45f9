"""MiniMax-M3's tower (https://huggingface.co/MiniMaxAI/MiniMax-M3), for still pictures.

x = LayerNorm(patches of pixels, times a matrix)
x += attention(LayerNorm(x))       all patches see each other; heads rotate by row and column
x += down(gelu(up(LayerNorm(x))))
y = fc2(gelu(fc1(x)))
tokens = fc4(gelu(fc3(merge x merge patches of y, joined)))

A third of each head rotates by time. Time is 0 for still pictures, so this third does not rotate here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.layer_norm_sizes import QKV
from moeserve.visualserver.shapes.minimax_m3 import MiniMaxShape
from moeserve.visualserver.towers.axial import ROPE_THETA, AxialTower, merge_order
from moeserve.visualserver.towers.tower import CPU, SliceEnded
from moeserve.visualserver.towers.weights import InputFormat


class MiniMaxTower(AxialTower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: MiniMaxShape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        self._patches = self._still_patches()
        dim = shape.hidden // shape.heads
        self._pairs = dim // 3 // 2  # rotating pairs of each axis
        exponents = torch.arange(self._pairs, dtype=torch.float64, device=device) / self._pairs
        self._inverse = ROPE_THETA**-exponents
        order = rows_in_split_halves(shape.hidden, shape.heads).to(device)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            for name in QKV[:2]:
                self.weights.reorder(at + name, order)
            self.weights.join([at + name for name in QKV], at + "attn_qkv")

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        shape, product = self.shape, self.weights.product
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        order = merge_order(rows, columns, shape.merge).to(self.device)
        x = functional.linear(self._patches_of(pixels)[order], self._patches)
        x = self._layer_norm("v.pre_ln", x, shape.eps)
        turns = self._angles(columns, order)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            self._add_attention(at, x, shape.eps, turns)
            slice_ended((layer + 0.5) / shape.layers)
            self._add_perceptron(at, x, shape.eps)
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        y = product("mm.2", functional.gelu(product("mm.1", x, is_exact=True)), is_exact=True)
        joined = y.view(-1, shape.output * shape.merge**2)
        return product(
            "mm.merger.fc2", functional.gelu(product("mm.merger.fc1", joined, is_exact=True)), is_exact=True
        )

    def _angles(self, columns: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of a head's first half, float32 [patches, head / 2]: the parts of time, height and width,
        and then the numbers that do not rotate."""
        row, column = order // columns, order % columns
        turning = torch.stack((row, column), 1).double()[:, :, None] * self._inverse
        angles = torch.zeros(
            len(order), self.shape.hidden // self.shape.heads // 2, device=self.device
        ).double()
        angles[:, self._pairs : 3 * self._pairs] = turning.flatten(1)
        return angles.cos().float(), angles.sin().float()


def rows_in_split_halves(hidden: int, heads: int) -> Tensor:
    """Returns the file's row for each row of `AxialTower`'s q and k, int64 [hidden]. In the file a head has the two
    halves of time, then those of height, then those of width, and then the numbers that do not rotate."""
    count = torch.arange(hidden).view(heads, -1)
    pairs = count.shape[1] // 3 // 2
    halves = count[:, : 6 * pairs].reshape(heads, 3, 2, pairs).transpose(1, 2).reshape(heads, 2, -1)
    still = count[:, 6 * pairs :].reshape(heads, 2, -1)
    return torch.cat([halves, still], dim=2).flatten()
