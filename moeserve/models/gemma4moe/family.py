"""Gemma 4 with experts, 26B-A4B (https://ai.google.dev/gemma/docs/core): layers that see a window and layers that see
all, each with heads of its own form; a dense feed-forward beside the experts; norms before and behind each part.

Not: the small models (E2B, E4B), whose layers have inputs of their own and share keys and values, and the dense one.
"""

from __future__ import annotations

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.gemma4moe.hugging_face import MAPPING
from moeserve.models.interface import (
    AttentionShape,
    LayerShape,
    ModelFamily,
    ModelShape,
    MoeShape,
    SharedExpert,
)
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

CAPPED_TOGETHER = 16  # logits, on the CPU


def read_shape(source: ModelSource) -> ModelShape:
    """Raises ModelError. No key says that scores are not scaled, that v is normalised, that embeddings are multiplied
    by sqrt(hidden), or, of a GGUF, whether a layer has a matrix of v: a missing tensor does."""
    reader = ShapeReader(source)
    for suffix in ("embedding_length_per_layer_input", "attention.shared_kv_layers"):
        reader.only(suffix, 0)
    num_experts, top_k, width = reader.experts()
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        RouterOptions(scoring="softmax"),
        shared=SharedExpert(reader.dense_width(), is_gated=False, parts=n.FFN_PARTS, activation="gelu"),
        activation="gelu",
        expert_scale=True,
        router_norm=True,
    )
    windowed = reader.flags("attention.sliding_window_pattern")
    layers = tuple(
        LayerShape(_attention(reader, source, index, is_windowed), moe, is_sandwiched=True)
        for index, is_windowed in enumerate(windowed)
    )
    shape = reader.model(
        layers,
        embedding_scale=reader.hidden_size**0.5,
        logit_softcap=reader.number("final_logit_softcapping", 1e-3, 1e6),
    )
    if shape.rope_scaling.type != "none":
        raise reader.error(
            "rope.scaling.type",
            f"is {shape.rope_scaling.type!r}; layers with windows and without would be stretched alike, which is not "
            "supported",
        )
    if shape.vocab_size % CAPPED_TOGETHER:
        raise reader.error(
            "vocab_size", f"is {shape.vocab_size}; capped logits need a multiple of {CAPPED_TOGETHER}"
        )
    return shape


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
