"""The base of towers whose layers are

x += attention(LayerNorm(x))
x += down(gelu(up(LayerNorm(x))))

with biases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.shape import PixelScale, TowerShape
from moeserve.visualserver.towers.tower import Tower
from moeserve.visualserver.towers.weights import InputFormat

if TYPE_CHECKING:
    from moeserve.visualserver.towers.fused_layers import FusedLayers


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
        self._fused: FusedLayers | None = None
        if device.type == "cuda":
            self.fuse()

    def fuse(self) -> None:
        """Lets `FusedLayers` compute the layers whose products it takes, from now on."""
        from moeserve.visualserver.towers.fused_layers import FusedLayers  # imports triton

        self._fused = FusedLayers(self.weights, self._sizes.heads, self._attention)

    def _patches_of(self, pixels: Tensor) -> Tensor:
        """Returns float32 [patches, 3 * patch * patch], patches row by row. A patch's numbers are in the order channel,
        row, column."""
        side = self._sizes.patch
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        scaled = pixels.float() / self._scale - self._shift
        return scaled.view(rows, side, columns, side, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)

    def _add_perceptron(self, at: str, x: Tensor, eps: float, approximate: str = "none") -> None:
        """x += down(gelu(up(LayerNorm(x)))) of a layer. approximate: see torch's `gelu`."""
        if self._fused is not None and self._fused.takes(at + self.up, at + self.down):
            self._fused.add_perceptron(at, x, eps, approximate, self.up, self.down)
            return
        wide = self.weights.product(at + self.up, self._layer_norm(at + "ln2", x, eps))
        wide = functional.gelu(wide, approximate=approximate)
        x += self.weights.product(at + self.down, wide)

    def _add_attention(self, at: str, x: Tensor, eps: float, turns: tuple[Tensor, Tensor] | None) -> None:
        """x += attn_out(attention(attn_qkv(LayerNorm(x)))) of a layer. turns: cos and sin by which q and k rotate,
        float32 [patches, head / 2]; None: they do not."""
        if self._fused is not None and self._fused.takes(at + "attn_qkv", at + "attn_out"):
            self._fused.add_attention(at, x, eps, turns)
            return
        x += self._attend(at, self._layer_norm(at + "ln1", x, eps), turns)

    def _attend(self, at: str, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns attn_out(attention(attn_qkv(x)))."""
        n, heads = len(x), self._sizes.heads
        # If q, k and the last products had rounded inputs, the error would be twice as large: 1e-3.
        qkv = self.weights.product(at + "attn_qkv", x, is_exact=True)
        qkv = qkv.view(n, 3, heads, -1).permute(1, 2, 0, 3)
        packed = torch.empty(qkv.shape, dtype=self.weights.dtype, device=qkv.device)
        if turns is None:
            packed.copy_(qkv)
        else:
            _rotate(qkv[:2], *turns, packed[:2])
            packed[2] = qkv[2]
        del qkv  # a third of the memory that a picture would take here
        return self.weights.product(at + "attn_out", self._attention(*packed))

    def _layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        w = self.weights
        return functional.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Writes heads, float32 [..., patches, dim], rotated in split halves, to `out`. The result is rounded while it is
    written, because on a GPU each further operation would read and write all heads."""
    a, b = heads.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    torch.addcmul(a * cos, b, sin, value=-1, out=first)
    torch.addcmul(b * cos, a, sin, out=second)
