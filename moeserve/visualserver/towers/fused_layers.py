"""A tower's layers on a GPU, with all operations between two products in one kernel (kernels/tower)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moeserve.kernels.tower import attention, op
from moeserve.visualserver.towers.weights import TowerWeights

# q, k and v [heads, patches, dim] to [patches, heads * dim]: `Tower._attention`.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class FusedLayers:
    """Computes what `LayerNormTower` computes, with the same roundings. Tensors' names: see there."""

    def __init__(self, weights: TowerWeights, heads: int, attention: Attention) -> None:
        self._weights = weights
        self._heads = heads
        self._attention = attention

    def takes(self, *names: str) -> bool:
        """Returns whether all these products have 16-bit matrices and inputs."""
        w = self._weights
        return w.is_narrow and all(w[name + ".weight"].dtype == w.dtype for name in names)

    def add_attention(self, at: str, x: Tensor, eps: float, turns: tuple[Tensor, Tensor] | None) -> None:
        """Computes x += attn_out(attention(attn_qkv(LayerNorm(x)))). x: float32 [patches, hidden]. turns: cos and sin
        of the rotation by which q and k turn; None: they do not."""
        w, qkv = self._weights, at + "attn_qkv"
        y, rest = op.layer_norm(x, w[at + "ln1.weight"], w[at + "ln1.bias"], eps, w.dtype, is_exact=True)
        assert rest is not None, "is_exact"
        first, more = w.wide_product(qkv, y), w.wide_product(qkv, rest)
        del y, rest
        packed = op.split_heads(first, more, w.bias(qkv), turns, self._heads, w.dtype)
        del first, more  # half of the memory that a picture would take here
        if attention.takes(packed):
            mixed = attention.attention(packed)
        else:
            mixed = self._attention(*packed.transpose(1, 2))
        op.add_product(x, w.wide_product(at + "attn_out", mixed), w.bias(at + "attn_out"))

    def add_perceptron(self, at: str, x: Tensor, eps: float, approximate: str, up: str, down: str) -> None:
        """Computes x += down(gelu(up(LayerNorm(x)))) in place, x [patches, hidden]. at: beginning of the layer's tensor
        names; up, down: names of the products; approximate: gelu's form, as in torch."""
        w = self._weights
        y, _ = op.layer_norm(x, w[at + "ln2.weight"], w[at + "ln2.bias"], eps, w.dtype)
        wide = op.gelu(w.wide_product(at + up, y), w.bias(at + up), approximate, w.dtype)
        op.add_product(x, w.wide_product(at + down, wide), w.bias(at + down))
