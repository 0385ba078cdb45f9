"""Gemma 4 (https://ai.google.dev/gemma/docs/core).

Sliding-window and full-attention layers have heads of different sizes. Norms come before and after each part.
26B-A4B has experts next to the dense feed-forward, 31B has none. The small models (E2B, E4B) have per-layer
embeddings, and their last layers use keys and values of earlier layers.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.gemma4moe.hugging_face import MAPPING
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    No key states that scores are not scaled, that v is normalised, or that embeddings are multiplied by sqrt(hidden).
    In a GGUF a missing v tensor, not a key, shows that v is made from k."""
    reader = ShapeReader(source)
    reader.activation("gelu_pytorch_tanh", "gelu")
    windowed = reader.flags("attention.sliding_window_pattern")
    attention = [_attention(reader, source, index, sees) for index, sees in enumerate(windowed)]
    layers = zip(_shared_kv(reader, attention), _feed_forwards(reader), strict=True)
    input_width = reader.integer("embedding_length_per_layer_input", 0, 1 << 16, default=0)
    shape = reader.model(
        tuple(LayerShape(mixer, ffn, is_sandwiched=True, has_factor=True) for mixer, ffn in layers),
        embedding_scale=reader.hidden_size**0.5,
        logit_softcap=reader.number("final_logit_softcapping", 1e-3, 1e6),
        layer_input_width=input_width,
        spans_see_ahead=_spans_see_ahead(reader, input_width),
    )
    if shape.rope_scaling.type != "none":
        raise reader.error(
            "rope.scaling.type",
            f"is {shape.rope_scaling.type!r}; layers with windows and without would be stretched alike, which is not "
            "supported",
        )
    return shape


def _spans_see_ahead(reader: ShapeReader, input_width: int) -> bool:
    """Returns whether a picture's rows attend to one another in both directions. A folder states it, a GGUF does
    not. The small published models (with per-layer embeddings) attend causally within pictures
    (https://github.com/ggml-org/llama.cpp/issues/28318)."""
    return reader.flag(n.SPANS_SEE_AHEAD, default=input_width == 0)


def _feed_forwards(reader: ShapeReader) -> list[MoeShape | DenseFfnShape]:
    widths = reader.layer_integers("feed_forward_length", 1, 1 << 20)
    if not reader.integer("expert_count", 0, 4096, default=0):
        return [DenseFfnShape(width, activation="gelu") for width in widths]
    num_experts, top_k, width = reader.experts()
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        RouterOptions(scoring="softmax"),
        shared=SharedExpert(widths[0], is_gated=False, parts=n.FFN_PARTS, activation="gelu"),
        activation="gelu",
        expert_scale=True,
        parts_normed=True,
    )
    return [moe] * len(widths)


def _shared_kv(reader: ShapeReader, layers: list[AttentionShape]) -> list[AttentionShape]:
    """Makes the last layers use the keys and values of the last earlier layer of the same window."""
    suffix = "attention.shared_kv_layers"
    own = len(layers) - reader.integer(suffix, 0, len(layers) - 1, default=0)
    shapes = layers[:own]
    for layer in layers[own:]:
        source = max((i for i in range(own) if layers[i].window == layer.window), default=None)
        if source is None:
            raise reader.error(
                suffix, f"leaves {own} layers, none of which has the same window as a later one"
            )
        shapes.append(replace(layer, kv_from=source, v_from_k=False, has_v_norm=False))
    return shapes


def _attention(reader: ShapeReader, source: ModelSource, index: int, is_windowed: bool) -> AttentionShape:
    said = reader.optional_flags(n.VALUES_FROM_KEYS)
    from_keys = n.of_layer(index, n.ATTN_V) not in source.tensors if said is None else said[index]
    of_kind = "_swa" if is_windowed else ""
    num_heads = reader.integer("attention.head_count", 1, 1024)
    num_kv_heads = reader.layer_integers("attention.head_count_kv", 1, num_heads)[index]
    head_dim = reader.integer(f"attention.key_length{of_kind}", 2, 1024)
    if num_heads % num_kv_heads:
        raise reader.error(
            "attention.head_count_kv", f"has {num_kv_heads}; it must divide the {num_heads} heads"
        )
    reader.only(f"attention.value_length{of_kind}", head_dim)
    reader.only(f"rope.dimension_count{of_kind}", head_dim)
    return AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        qk_norm="head",
        window=reader.integer("attention.sliding_window", 1, 1 << 24) if is_windowed else 0,
        scale=1.0,
        has_v_norm=True,
        v_from_k=from_keys,
        rope_theta=reader.number("rope.freq_base_swa", 2.0, 1e12) if is_windowed else None,
        has_rope_factors=not is_windowed and n.ROPE_FREQS in source.tensors,
    )


FAMILY = ModelFamily(architecture="gemma4", read_shape=read_shape, hugging_face=MAPPING)
