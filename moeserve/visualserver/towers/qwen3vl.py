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
from moeserve.visualserver.towers.tower import CPU, SliceEnded, Tower

EPS: Final = 1e-6  # of LayerNorm: the file's key has the text model's
ROPE_THETA: Final = 10000.0


class Qwen3VlTower(Tower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: Qwen3VlShape,
        device: torch.device = CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(source, shape, device, dtype)
        self.shape = shape
        # A still picture is the same at both times of a patch.
        later = self.weights.pop("v.patch_embd.weight.1")
        self._patches = (self.weights.pop("v.patch_embd.weight") + later).flatten(1)
        dims = shape.hidden // shape.heads // 4
        self._inverse = ROPE_THETA ** (-torch.arange(dims, dtype=torch.float64, device=device) / dims)

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        """A row has the embedding, then what each layer of DeepStack has for the text model's layers."""
        shape, product = self.shape, self.weights.product
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        order = merge_order(rows, columns, shape.merge).to(self.device)
        x = functional.linear(
            self._patches_of(pixels)[order], self._patches, self.weights["v.patch_embd.bias"]
        )
        x += self._positions(rows, columns)[order]
        cos, sin = self._angles(columns, order)
        deep = []
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            x += self._attend(at, self._norm(at + "ln1", x), cos, sin)
            slice_ended((layer + 0.5) / shape.layers)
            wide = product(at + "ffn_up", self._norm(at + "ln2", x))
            x += product(at + "ffn_down", functional.gelu(wide, approximate="tanh"))
            if layer in shape.deep:
                at = f"v.deepstack.{layer}."
                joined = self._norm(at + "norm", self._joined(x))
                deep.append(product(at + "fc2", functional.gelu(product(at + "fc1", joined))))
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        joined = self._joined(self._norm("v.post_ln", x))
        tokens = product("mm.2", functional.gelu(product("mm.0", joined, is_exact=True)), is_exact=True)
        return torch.cat([tokens, *deep], dim=1)

    def _joined(self, x: Tensor) -> Tensor:
        """The patches of a token, one after another: [tokens, merge * merge * hidden]."""
        return x.view(-1, self.shape.hidden * self.shape.merge**2)

    def _patches_of(self, pixels: Tensor) -> Tensor:
        """Returns float32 [patches, 3 * patch * patch]: per patch, its numbers by channel, row and column."""
        side = self.shape.patch
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        split = pixels.view(rows, side, columns, side, 3)
        return split.permute(0, 2, 4, 1, 3).reshape(rows * columns, -1).float() / 127.5 - 1.0

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The learned table, resampled bilinearly with its corners at the picture's: [patches, hidden], row by row."""
        side = self.shape.positions
        table = self.weights["v.position_embd.weight"].view(1, side, side, -1).permute(0, 3, 1, 2)
        grid = functional.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)
        return grid[0].permute(1, 2, 0).reshape(rows * columns, -1)

    def _angles(self, columns: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a head's first half, float32 [patches, head / 2]: a quarter by row, a quarter by column."""
        row, column = order // columns, order % columns
        angles = torch.stack((row, column), 1).double()[:, :, None] * self._inverse
        flat = angles.flatten(1)
        return flat.cos().float(), flat.sin().float()

    def _attend(self, at: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, heads = len(x), self.shape.heads
        # With q, k and the last products of rounded inputs the error would be twice as large: 1e-3.
        qkv = self.weights.product(at + "attn_qkv", x, is_exact=True)
        qkv = qkv.view(n, 3, heads, -1).permute(1, 2, 0, 3)
        q, k = _rotated(qkv[:2], cos, sin, self.weights.dtype)[:, None]
        v = qkv[None, 2].to(self.weights.dtype)
        mixed = functional.scaled_dot_product_attention(q, k, v)[0]
        return self.weights.product(at + "attn_out", mixed.transpose(0, 1).reshape(n, -1))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        w = self.weights
        return functional.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], EPS)


def merge_order(rows: int, columns: int, merge: int) -> Tensor:
    """The patches, counted row by row, in the tower's order: those of a token follow one another."""
    count = torch.arange(rows * columns)
    return count.view(rows // merge, merge, columns // merge, merge).permute(0, 2, 1, 3).flatten()


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotates heads, float32 [..., patches, dim], in split halves. Returns `dtype`, contiguous: rounded
    as it is written, because on a GPU each further operation reads and writes all heads."""
    a, b = heads.chunk(2, dim=-1)
    out = torch.empty(heads.shape, dtype=dtype, device=heads.device)
    first, second = out.chunk(2, dim=-1)
    torch.addcmul(a * cos, b, sin, value=-1, out=first)
    torch.addcmul(b * cos, a, sin, out=second)
    return out
