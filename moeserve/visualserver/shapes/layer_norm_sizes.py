"""The base of the shapes of `LayerNormTower`s (towers/layer_norm.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from moeserve.visualserver.shapes.shape import TowerSizes, axial_attention_floats, perceptron_floats

QKV: Final = ("attn_q", "attn_k", "attn_v")  # a layer's products, if the file has them apart


def with_biases(products: dict[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the products' matrices and biases. products: rows and columns by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in products.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormSizes(TowerSizes):
    """See `TowerShape`."""

    is_joined: ClassVar[bool] = True  # the file has q, k and v as one product

    ffn: int

    @property
    def layer_token_floats(self) -> int:
        """Floats of GPU memory per token in a layer. Measured: 15,947 a patch with Qwen3.6's shape."""
        return self.merge**2 * (2 * self.ffn + 7 * self.hidden)

    def layer_floats(self, *, is_block_float: bool) -> int:
        """Returns how many float32 numbers of RAM a layer needs on the CPU for each patch."""
        perceptron = perceptron_floats(self.hidden, self.ffn, is_block_float=is_block_float)
        return max(axial_attention_floats(self.hidden), perceptron)

    @property
    def token_floats(self) -> int:
        return self.layer_token_floats

    def patch_floats(self, *, is_block_float: bool) -> int:
        """See `TowerShape`."""
        return self.most_floats(self.layer_floats(is_block_float=is_block_float))

    @property
    def up_and_down(self) -> tuple[str, str]:
        """The names of the two products of a layer's feed-forward."""
        return "ffn_up", "ffn_down"

    def norm_shapes(self, *names: str) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights and biases of these LayerNorms over a patch's row."""
        return {f"{name}.{part}": (self.hidden,) for name in names for part in ("weight", "bias")}

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the row-major shape of every tensor of the layers, by name."""
        h, (up, down) = self.hidden, self.up_and_down
        qkv = {"attn_qkv": (3 * h, h)} if self.is_joined else dict.fromkeys(QKV, (h, h))
        products = qkv | {"attn_out": (h, h), up: (self.ffn, h), down: (h, self.ffn)}
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.layers):
            at = f"v.blk.{layer}."
            shapes |= with_biases({at + name: sizes for name, sizes in products.items()})
            shapes |= self.norm_shapes(at + "ln1", at + "ln2")
        return shapes
