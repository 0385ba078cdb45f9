"""The products of a model that an adapter may change, by the GGUF names of their matrices."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.sources.gguf import names as n

QKV_PARTS = (n.ATTN_Q, n.ATTN_K, n.ATTN_V)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Shape of a matrix [rows, cols], one for each of `experts`."""

    cols: int
    rows: int
    experts: int = 1
    is_routed: bool = False


def products_of(shape: ModelShape, layer: int) -> dict[str, ProductShape]:
    """Returns the adaptable products of a layer. Not adaptable: recurrent layers, latent attention, gated q, q and k
    whose rotated dimensions the file stores as neighbouring pairs, feed-forwards without a gate, and feed-forwards
    whose rows were moved (`ColumnOrders`)."""
    of_layer = shape.layers[layer]
    moved = frozenset() if shape.orders is None else shape.orders.moved_rows
    ffn = _of_ffn(shape.hidden_size, of_layer)
    if any(n.of_layer(layer, part) in moved for part in ffn):
        ffn = {part: product for part, product in ffn.items() if part == n.FFN_GATE_INP}
    return _of_attention(shape.hidden_size, of_layer) | ffn


def most_tensors(shape: ModelShape) -> int:
    """Returns the largest number of tensors in an adapter of the model: A and B of each matrix."""
    layers = (products_of(shape, layer).values() for layer in range(shape.num_layers))
    return 2 * sum(product.experts for products in layers for product in products)


def _of_attention(hidden: int, layer: LayerShape) -> dict[str, ProductShape]:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionShape):
        return {}
    found = {
        n.ATTN_Q: ProductShape(hidden, mixer.q_width),
        n.ATTN_K: ProductShape(hidden, mixer.kv_width),
        n.ATTN_V: ProductShape(hidden, mixer.value_width),
        n.ATTN_OUTPUT: ProductShape(mixer.output_width, hidden),
    }
    if mixer.is_gated:
        del found[n.ATTN_Q]
    if mixer.in_pairs:  # an adapter's rows would have to be reordered as well
        del found[n.ATTN_Q], found[n.ATTN_K]
    # no v if v is computed from k; no k and v if they are an earlier layer's
    own = (*mixer.qkv_parts, n.ATTN_OUTPUT)
    return {part: product for part, product in found.items() if part in own}


def _of_ffn(hidden: int, layer: LayerShape) -> dict[str, ProductShape]:
    ffn = layer.ffn
    if isinstance(ffn, DenseFfnShape):
        return _gated(ffn.parts, hidden, ffn.width)
    if ffn is None:
        return {}
    found = {n.FFN_GATE_INP: ProductShape(hidden, ffn.num_experts)}
    found |= _gated(ffn.parts, hidden, ffn.width, ffn.num_experts, is_routed=True)
    if ffn.shared is not None:
        found |= _gated(ffn.shared.parts, hidden, ffn.shared.width)
    return found


def _gated(
    parts: tuple[str, ...], hidden: int, width: int, experts: int = 1, *, is_routed: bool = False
) -> dict[str, ProductShape]:
    gate, up, down = parts
    if gate == up:
        return {}
    inner = ProductShape(hidden, width, experts, is_routed)
    return {gate: inner, up: inner, down: ProductShape(width, hidden, experts, is_routed)}
