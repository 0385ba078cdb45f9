"""Granite 3 with experts (https://huggingface.co/ibm-granite/granite-3.1-3b-a800m-base): four scales, of
embeddings, attention scores, block outputs and logits.

Every block's output is multiplied by one number s before it is added. Instead, the residual stream is kept divided
by s: embeddings are also multiplied by 1 / s, blocks add their output unscaled, and norms, which ignore a factor of
their input, use an epsilon divided by s squared.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.expert_matrices import linear_experts
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, DECODER_LAYER, HuggingFaceMapping
from moeserve.models.sources.source import ModelSource

_UNDER = "block_sparse_moe."


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    return scaled_model(reader, (LayerShape(attention(reader), experts(reader)),) * reader.num_layers)


def experts(reader: ShapeReader) -> MoeShape:
    """Returns the shape of a layer's experts, maybe beside a shared one. Raises ModelError for a missing or unsupported
    setting."""
    width = reader.integer("expert_shared_feed_forward_length", 0, 1 << 16, default=0)
    return MoeShape(
        *reader.experts("feed_forward_length"),
        RouterOptions(scoring="softmax"),
        shared=SharedExpert(width, is_gated=False) if width else None,
    )


def feed_forward(reader: ShapeReader) -> MoeShape | DenseFfnShape:
    """Returns the shape of the experts, or of the feed-forward of a model without. Raises ModelError for a missing or
    unsupported setting."""
    if reader.integer("expert_count", 0, 4096, default=0):
        return experts(reader)
    return DenseFfnShape(reader.dense_width())  # also of a file that states a shared expert's width


def attention(reader: ShapeReader) -> AttentionShape:
    """Reads attention's shape. Raises ModelError. A scale of 0 means no scale, as in llama.cpp."""
    return AttentionShape(
        *reader.heads(),
        scale=reader.number("attention.scale", 0.0, 1e3, default=0.0) or None,
        in_pairs=not reader.flag(n.ROPE_HALVES, default=False),
        has_positions=reader.flag("rope.scaling.finetuned", default=True),
    )


def scaled_model(reader: ShapeReader, layers: tuple[LayerShape, ...]) -> ModelShape:
    """Returns the shape of a model of these layers, with its scales. Raises ModelError for a missing or unsupported
    setting."""
    added = reader.number("residual_scale", 0.0, 1e3, default=0.0) or 1.0
    shape = reader.model(
        layers,
        embedding_scale=(reader.number("embedding_scale", 0.0, 1e6, default=0.0) or 1.0) / added,
        logit_scale=1.0 / (reader.number("logit_scale", 0.0, 1e6, default=0.0) or 1.0),
        rope_theta=10000.0,
    )
    return replace(shape, rms_eps=shape.rms_eps / added**2)


FAMILY = ModelFamily(
    architecture="granitemoe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="granitemoe",
        keys=DECODER_KEYS
        | {
            "expert_count": ("num_local_experts",),
            "expert_used_count": ("num_experts_per_tok",),
            "feed_forward_length": ("intermediate_size",),
            "attention.scale": ("attention_multiplier",),
            "embedding_scale": ("embedding_multiplier",),
            "residual_scale": ("residual_multiplier",),
            "logit_scale": ("logits_scaling",),
        },
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False)},
        layer=DECODER_LAYER,
        moe={n.of_part(n.FFN_GATE_INP): f"{_UNDER}router.layer.weight"},
        made=linear_experts,
        metadata={n.ROPE_HALVES: True},
        rope_theta=10000.0,
    ),
)
