"""Gemma 4's tower (https://ai.google.dev/gemma/docs/core), in float32.

x = patches of pixels, times a matrix, + learned positions of the column and of the row
x += norm(attention(norm(x)))      all patches see each other; q, k and v are normalised by head, and the halves of q's
                                   and k's heads rotate by column and by row
x += norm(down(gelu(gate(norm(x))) * up(norm(x))))
tokens = projection(norm(the mean of merge x merge patches of x, times sqrt(hidden), standardised))

All norms are RMS norms; those of v and of tokens have no weight.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.loading.floats import read_floats
from moeserve.models.sources.gguf import GGUFFile
from moeserve.visualserver.shapes.gemma4 import BOUNDS, PRODUCTS, STANDARD, Gemma4Shape

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

ROPE_THETA: Final = 100.0


class Gemma4Tower:
    """One writer and reader: the visual server's thread."""

    def __init__(self, file: GGUFFile, shape: Gemma4Shape) -> None:
        """Reads all weights into RAM, in float32."""
        self.shape = shape
        self._weights = {name: read_floats(file, name) for name in shape.tensor_shapes()}
        self._patches = self._weights.pop("v.patch_embd.weight").flatten(1)
        self._bounds: dict[str, list[float]] = {}  # by product: of inputs and outputs, least and most
        if shape.is_clamped:
            for product in (f"v.blk.{layer}.{name}" for layer in range(shape.layers) for name in PRODUCTS):
                self._bounds[product] = [self._weights.pop(f"{product}.{bound}").item() for bound in BOUNDS]
        dims = shape.hidden // shape.heads // 4
        self._inverse = ROPE_THETA ** (-torch.arange(dims, dtype=torch.float64) / dims)

    def warm(self) -> None:
        """What torch loads and allocates with the first picture."""
        side = 4 * self.shape.token_side
        self.encode(np.zeros((side, side, 3), np.uint8))

    def encode(self, pixels: Pixels) -> np.ndarray[Any, np.dtype[np.float32]]:
        """pixels: [height, width, 3], sides multiples of `shape.token_side`. Returns [tokens, output], row by row."""
        shape = self.shape
        rows, columns = pixels.shape[0] // shape.patch, pixels.shape[1] // shape.patch
        with torch.inference_mode():
            column, row = torch.arange(columns).repeat(rows), torch.arange(rows).repeat_interleave(columns)
            table = self._weights["v.position_embd.weight"]
            x = functional.linear(self._patches_of(pixels), self._patches) + (
                table[0][column] + table[1][row]
            )
            cos, sin = self._angles(column, row)
            for layer in range(shape.layers):
                at = f"v.blk.{layer}."
                mixed = self._attend(at, self._norm(at + "ln1", x), cos, sin)
                x += self._norm(at + "attn_post_norm", mixed)
                x += self._norm(at + "ffn_post_norm", self._feed_forward(at, self._norm(at + "ln2", x)))
            tokens = self._pooled(x, rows, columns)
            return functional.linear(tokens, self._weights["mm.input_projection.weight"]).numpy()

    def _patches_of(self, pixels: Pixels) -> Tensor:
        """float32 [patches, 3 * patch * patch], row by row, from -1 to 1: channel, row, column of each."""
        side = self.shape.patch
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        split = torch.from_numpy(pixels.copy()).view(rows, side, columns, side, 3)
        return 2.0 * (split.permute(0, 2, 4, 1, 3).reshape(rows * columns, -1).float() / 255.0 - 0.5)

    def _angles(self, column: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [patches, 2, head / 4]: of a head's half that rotates by column, and of the other."""
        angles = torch.stack((column, row), 1).double()[:, :, None] * self._inverse
        return angles.cos().float(), angles.sin().float()

    def _attend(self, at: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, heads = len(x), self.shape.heads
        q, k, v = (self._product(at + name, x).view(n, heads, -1) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = (self._norm(f"{at}attn_{name}_norm", part) for name, part in (("q", q), ("k", k)))
        q, k, v = (
            part.transpose(0, 1)[None]
            for part in (_rotated(q, cos, sin), _rotated(k, cos, sin), self._norm(None, v))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, scale=1.0)[0]
        return self._product(at + "attn_out", mixed.transpose(0, 1).reshape(n, -1))

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        gate = functional.gelu(self._product(at + "ffn_gate", x), approximate="tanh")
        gate *= self._product(at + "ffn_up", x)
        return self._product(at + "ffn_down", gate)

    def _pooled(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """The tokens before the last product, [tokens, hidden]."""
        side, hidden = self.shape.merge, self.shape.hidden
        split = x.view(rows // side, side, columns // side, side, hidden)
        tokens = split.mean(dim=(1, 3)).view(-1, hidden) * hidden**0.5
        if self.shape.is_standardized:
            bias, scale = (self._weights[name] for name in STANDARD)
            tokens = (tokens - bias) * scale
        return self._norm(None, tokens)

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        weight = None if name is None else self._weights[name + ".weight"]
        return functional.rms_norm(x, x.shape[-1:], weight, self.shape.eps)

    def _product(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[name + ".weight"]
        bounds = self._bounds.get(name)
        if bounds is None:
            return functional.linear(x, weight)
        return functional.linear(x.clamp(*bounds[:2]), weight).clamp(*bounds[2:])


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads: [patches, heads, dim], whose halves rotate apart, each half against half."""
    halves = heads.unflatten(-1, (2, 2, -1))  # [patches, heads, column or row, half, dim / 4]
    a, b = halves[:, :, :, 0], halves[:, :, :, 1]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=3).flatten(2)
