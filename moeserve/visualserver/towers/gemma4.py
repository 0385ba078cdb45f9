"""Gemma 4's tower (https://ai.google.dev/gemma/docs/core).

x = patches of pixels, times a matrix, + learned positions of the column and of the row
x += norm(attention(norm(x)))      all patches see each other; q, k and v are normalised by head, and the halves of q's
                                   and k's heads rotate by column and by row
x += norm(down(gelu(gate(norm(x))) * up(norm(x))))
tokens = projection(norm(the mean of merge x merge patches of x, times sqrt(hidden), standardised))

All norms are RMS norms; those of v and of tokens have no weight.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.gemma4 import BOUNDS, PRODUCTS, STANDARD, Gemma4Shape
from moeserve.visualserver.towers.tower import CPU, SliceEnded, Tower
from moeserve.visualserver.towers.weights import InputFormat

ROPE_THETA: Final = 100.0


class Gemma4Tower(Tower):
    """See `Tower`."""

    def __init__(
        self,
        source: TensorSource,
        shape: Gemma4Shape,
        device: torch.device = CPU,
        inputs: InputFormat | None = None,
    ) -> None:
        super().__init__(source, shape, device, inputs)
        self.shape = shape
        self._patches = self.weights.pop("v.patch_embd.weight").flatten(1)
        # By product: the least and the most of its inputs, and of its outputs.
        self._bounds: dict[str, list[float]] = {}
        if shape.is_clamped:
            for product in (f"v.blk.{layer}.{name}" for layer in range(shape.layers) for name in PRODUCTS):
                self._bounds[product] = [self.weights.pop(f"{product}.{bound}").item() for bound in BOUNDS]
        dims = shape.hidden // shape.heads // 4
        self._inverse = ROPE_THETA ** (-torch.arange(dims, dtype=torch.float64, device=device) / dims)

    def _tokens(self, pixels: Tensor, slice_ended: SliceEnded) -> Tensor:
        shape = self.shape
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        column = torch.arange(columns, device=self.device).repeat(rows)
        row = torch.arange(rows, device=self.device).repeat_interleave(columns)
        table = self.weights["v.position_embd.weight"]
        x = functional.linear(self._patches_of(pixels), self._patches) + (table[0][column] + table[1][row])
        cos, sin = self._angles(column, row)
        for layer in range(shape.layers):
            at = f"v.blk.{layer}."
            x += self._norm(at + "attn_post_norm", self._attend(at, self._norm(at + "ln1", x), cos, sin))
            slice_ended((layer + 0.5) / shape.layers)
            x += self._norm(at + "ffn_post_norm", self._feed_forward(at, self._norm(at + "ln2", x)))
            if layer + 1 < shape.layers:
                slice_ended((layer + 1) / shape.layers)
        return self.weights.product("mm.input_projection", self._pooled(x, rows, columns))

    def _patches_of(self, pixels: Tensor) -> Tensor:
        """Returns float32 [patches, 3 * patch * patch] from -1 to 1, patches row by row. A patch's numbers are in the
        order channel, row, column."""
        side = self.shape.patch
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        split = pixels.view(rows, side, columns, side, 3)
        return 2.0 * (split.permute(0, 2, 4, 1, 3).reshape(rows * columns, -1).float() / 255.0 - 0.5)

    def _angles(self, column: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, float32 [patches, 2, head / 4]: for the half of a head that rotates by column, and for
        the half that rotates by row."""
        angles = torch.stack((column, row), 1).double()[:, :, None] * self._inverse
        return angles.cos().float(), angles.sin().float()

    def _attend(self, at: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, heads = len(x), self.shape.heads
        q, k, v = (self._product(at + name, x).view(n, heads, -1) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = (self._norm(f"{at}attn_{name}_norm", part) for name, part in (("q", q), ("k", k)))
        q, k, v = (
            part.transpose(0, 1).to(self.weights.dtype)
            for part in (_rotated(q, cos, sin), _rotated(k, cos, sin), self._norm(None, v))
        )
        return self._product(at + "attn_out", self._attention(q, k, v, scale=1.0))

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        gate = functional.gelu(self._product(at + "ffn_gate", x), approximate="tanh")
        gate *= self._product(at + "ffn_up", x)
        return self._product(at + "ffn_down", gate)

    def _pooled(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the tokens before the last product, [tokens, hidden]."""
        side, hidden = self.shape.merge, self.shape.hidden
        split = x.view(rows // side, side, columns // side, side, hidden)
        tokens = split.mean(dim=(1, 3)).view(-1, hidden) * hidden**0.5
        if self.shape.is_standardized:
            bias, scale = (self.weights[name] for name in STANDARD)
            tokens = (tokens - bias) * scale
        return self._norm(None, tokens)

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        """Returns float32."""
        weight = None if name is None else self.weights[name + ".weight"]
        return functional.rms_norm(x.float(), x.shape[-1:], weight, self.shape.eps)

    def _product(self, name: str, x: Tensor) -> Tensor:
        bounds = self._bounds.get(name)
        if bounds is None:
            return self.weights.product(name, x)
        return self.weights.product(name, x.clamp(*bounds[:2])).clamp(*bounds[2:])


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads, [patches, heads, dim]. The two halves of a head rotate separately, each as split halves."""
    halves = heads.unflatten(-1, (2, 2, -1))  # [patches, heads, column or row, half, dim / 4]
    a, b = halves[:, :, :, 0], halves[:, :, :, 1]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=3).flatten(2)
