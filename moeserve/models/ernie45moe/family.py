"""ERNIE 4.5 with experts (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), text only.

Rotary dimensions are pairs of neighbours. The first layers have no experts. The router scores by softmax; a choice bias
changes which experts are chosen, but not their weights, which are normalised. The shared experts form one ungated
feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The shared experts' width is computed from their number; the key for it is ignored, because llama.cpp's converter
    may write another number."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias(), in_pairs=True
    )
    num_experts, top_k, width = reader.experts()
    count = reader.integer("expert_shared_count", 0, 64, default=0)
    router = RouterOptions(
        scoring="softmax", scale=reader.number("expert_weights_scale", 0.0, 1e6, default=0.0) or 1.0
    )
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        router,
        shared=SharedExpert(count * width, is_gated=False) if count else None,
        choice_bias=reader.has_choice_bias(),
    )
    return reader.model(tuple(LayerShape(attention, ffn) for ffn in reader.feed_forwards(moe)))


def dense_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `moe_layer_start_index`, `_end_index` and `_interval`. Raises
    ModelError."""
    layers = config.get("num_hidden_layers")
    first, last, step = (
        default if config.get(f"moe_layer_{name}") is None else config[f"moe_layer_{name}"]
        for name, default in (("start_index", 1), ("end_index", -1), ("interval", 1))
    )
    if not all(isinstance(value, int) for value in (layers, first, last, step)) or step < 1:
        settings = ("num_hidden_layers", "moe_layer_interval")
        raise SettingError(path, f"{' or '.join(map(repr, settings))} is missing, or not a whole number")
    assert isinstance(layers, int)
    end = layers - 1 if last < 0 else last
    is_dense = [(layer + 1) % step != 0 or not first <= layer <= end for layer in range(layers)]
    return {n.DENSE_LAYERS: np.array(is_dense)} if any(is_dense) else {}


FAMILY = ModelFamily(
    architecture="ernie4_5-moe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="ernie4_5_moe",
        keys=DECODER_KEYS
        | {
            "expert_count": ("moe_num_experts", "num_experts"),
            "expert_used_count": ("moe_k", "num_experts_per_tok"),
            "expert_feed_forward_length": ("moe_intermediate_size",),
            "expert_shared_count": ("moe_num_shared_experts",),
            "feed_forward_length": ("intermediate_size",),
        },
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu"), "use_bias": (False, False)},
        layer=DECODER_LAYER,
        moe=MOE_ROUTER
        | SHARED_EXPERTS
        | {n.bias_of_part(n.EXP_PROBS_B): "mlp.moe_statics.e_score_correction_bias"},
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(SHARED_EXPERTS),
        skipped=("model.mtp_",),
        derived=dense_layers,
        flattened=frozenset({n.bias_of_part(n.EXP_PROBS_B)}),
        metadata={n.HAS_QKV_BIAS: False},
        rope_theta=500000.0,
        tied_by_default=True,
    ),
)
