"""Nemotron-H and Nemotron 3 (https://arxiv.org/abs/2504.03624): every layer is one block, Mamba-2, attention without
positions, or a feed-forward. Feed-forwards have no gate: down(relu(up(x))^2). Nemotron 3's are experts, with
DeepSeek-V3's router beside an ungated shared expert.

The next-token block is two such layers, attention and experts, which are read as one layer with two norms.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.nemotronh.hugging_face import MAPPING
from moeserve.models.recurrent_heads import mamba2_shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

FFN_LENGTH = "feed_forward_length"
KV_HEADS = "attention.head_count_kv"


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    Layers with KV heads are attention, layers with a feed-forward length are feed-forwards, the others are Mamba-2."""
    reader = ShapeReader(source)
    reader.activation("relu2", "relu_sqr")
    widths = reader.layer_integers(FFN_LENGTH, 0, 1 << 20)
    kv_heads = reader.layer_integers(KV_HEADS, 0, 1024)
    if not any(kv_heads):
        raise reader.error(KV_HEADS, "has no attention layer, which is not supported")
    ffns = _feed_forwards(reader, source, widths)
    # Of the two epsilons that files have, transformers computes with this one.
    of_norms = "attention.layer_norm_epsilon"
    eps = reader.number(of_norms, 1e-12, 1e-2) if reader.has(of_norms) else reader.rms_eps()
    mamba2 = mamba2_shape(reader, source, eps=eps)
    layers = []
    for index, (num_kv, ffn) in enumerate(zip(kv_heads, ffns, strict=True)):
        if num_kv and ffn is not None:
            raise reader.error(
                FFN_LENGTH, f"and {KV_HEADS} are both set in layer {index}, which has one block"
            )
        if ffn is not None:
            layers.append(LayerShape(None, ffn, ffn_norm=n.ATTN_NORM))
        else:
            layers.append(LayerShape(_attention(reader, num_kv) if num_kv else mamba2, None))
    reader.flag("rope.scaling.finetuned", default=False)
    return replace(reader.model(tuple(layers), rope_theta=10000.0, rms_eps=eps), rms_eps=eps)


def _attention(reader: ShapeReader, num_kv_heads: int) -> AttentionShape:
    return AttentionShape(*reader.heads(rotates_whole=False, num_kv_heads=num_kv_heads), has_positions=False)


def _feed_forwards(
    reader: ShapeReader, source: ModelSource, widths: list[int]
) -> list[MoeShape | DenseFfnShape | None]:
    is_dense = reader.optional_flags(n.DENSE_LAYERS) or [source.architecture == "nemotron_h"] * len(widths)
    dense = [
        DenseFfnShape(width, activation="relu", parts=n.UNGATED_FFN_PARTS) if width else None
        for width in widths
    ]
    if all(is_dense):
        return [*dense]
    num_experts, top_k, width = reader.experts()
    shared = reader.integer("expert_shared_feed_forward_length", 0, 1 << 20, default=0)
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        reader.sigmoid_router(num_experts, top_k, normalize=True),
        shared=SharedExpert(shared, is_gated=False, parts=n.UNGATED_SHARED_PARTS, activation="relu")
        if shared
        else None,
        choice_bias=reader.has_choice_bias(),
        activation="relu",
        parts=n.UNGATED_EXPERT_PARTS,
        latent=reader.integer("moe_latent_size", 0, 1 << 16, default=0),
    )
    return [each if alone or each is None else moe for alone, each in zip(is_dense, dense, strict=True)]


def next_token_layer(source: ModelSource, layer: LayerShape) -> LayerShape:
    """Returns the next-token block's layer. layer: the model's last layer that attends. Raises ModelError for a missing
    or unsupported setting."""
    ffn = next((each.ffn for each in read_shape(source).layers if isinstance(each.ffn, MoeShape)), None)
    if ffn is None:
        raise SettingError(source.path, "its next-token block (MTP) has experts, and no other layer has")
    return replace(layer, ffn=ffn, ffn_norm=n.FFN_NORM)


FAMILY = ModelFamily(
    architecture="nemotron_h_moe",
    read_shape=read_shape,
    hugging_face=MAPPING,
    has_next_token_block=True,
    next_token_layer=next_token_layer,
)
DENSE_FAMILY = ModelFamily(architecture="nemotron_h", read_shape=read_shape)
