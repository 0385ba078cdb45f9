"""gpt-oss (https://arxiv.org/abs/2508.10925).

By default every other layer has a sliding window. Each head's softmax has a sink. All products have biases. Expert
weights are a softmax over the chosen logits only. The activation is a clamped SwiGLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import layer_types, windows_of
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    MOE_KEYS,
    OUTPUT_BIAS,
    HuggingFaceMapping,
    renamed,
)
from moeserve.models.sources.source import ModelSource

PERIOD = 2  # layers; if no key says otherwise, the last of them has full attention


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    YaRN's interpolation ramp does not start and end at whole dimensions: the published config.json says so, but no GGUF
    key does (llama.cpp rounds: docs/reference/models.md)."""
    reader = ShapeReader(source)
    heads, router = reader.heads(), RouterOptions(scoring="softmax_topk")
    reader.only("expert_gating_func", 3)  # llama.cpp's number for a softmax of the chosen logits
    num_experts, top_k, width = reader.experts()
    moe = MoeShape(
        num_experts, top_k, width, router, router_bias=True, activation="swiglu_oai", expert_bias=True
    )
    attention = AttentionShape(
        *heads, qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias(), has_sinks=True
    )
    layers = tuple(
        LayerShape(seen, moe, n.POST_ATTENTION_NORM) for seen in reader.windowed(attention, PERIOD)
    )
    return reader.model(layers, yarn_truncates=False)


def windowed_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_types`. Raises ModelError for a missing or unsupported
    setting."""
    layers = config.get("num_hidden_layers")
    types = layer_types(path, config, layers) if isinstance(layers, int) else None
    return {} if types is None else windows_of(types)


FAMILY = ModelFamily(
    architecture="gpt-oss",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="gpt_oss",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "expert_count": ("num_local_experts", "num_experts"),
            "expert_feed_forward_length": ("intermediate_size",),
            n.SLIDING_WINDOW: ("sliding_window",),
            n.HAS_QKV_BIAS: ("attention_bias",),
        },
        defaults={n.HAS_QKV_BIAS: True},
        # setting: (the only supported value, transformers' default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "swiglu_alpha": (1.702, 1.702),
            "swiglu_limit": (7.0, 7.0),
        },
        layer=renamed(DECODER_LAYER, {n.FFN_NORM: n.POST_ATTENTION_NORM})
        | DECODER_BIASES
        | OUTPUT_BIAS
        | {n.of_part(n.ATTN_SINKS): "self_attn.sinks"},
        moe={
            n.of_part(n.FFN_GATE_INP): "mlp.router.weight",
            n.bias_of_part(n.FFN_GATE_INP): "mlp.router.bias",
        },
        interleaved_experts="mlp.experts",
        quantization=frozenset({"mxfp4"}),
        optional=frozenset(DECODER_BIASES | OUTPUT_BIAS),
        derived=windowed_layers,
    ),
)
