"""EXAONE-MoE, K-EXAONE-236B (https://huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B).

Sliding-window layers have RoPE; full-attention layers have no positions. q and k are normalised per head. The router is
DeepSeek-V3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.next_token_layers import layer_with_parts
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    SLIDING,
    derived_by,
    layer_types,
    leading_dense_layers,
    windows_of,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    GROUPED_ROUTER_KEYS,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import APART
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The architecture implies that layers without a window have no positions; no key states it."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head")
    seen = reader.windowed(attention)
    placed = [each if each.window else replace(each, has_positions=False) for each in seen]
    return reader.model(
        tuple(LayerShape(each, ffn) for each, ffn in zip(placed, reader.sigmoid_mixtures(), strict=True))
    )


def next_token_layer(source: ModelSource, _layer: LayerShape) -> LayerShape:
    """Returns the next-token block's layer, which has no experts, and a window if the file says so. Raises
    ModelError."""
    has_window = ShapeReader(source).next_token_has_window() or False
    return layer_with_parts(source, read_shape(source).layers, has_window=has_window)


def windowed_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_types`, and the next-token block's. Raises ModelError for a
    missing or unsupported setting."""
    layers = config.get("num_hidden_layers")
    types = layer_types(path, config, layers) if isinstance(layers, int) else None
    if types is None:
        raise SettingError(path, f"{'layer_types'!r} is missing")
    values = windows_of(types)
    of_blocks = config.get("mtp_layer_types")
    if isinstance(of_blocks, list) and of_blocks:
        values[n.NEXT_TOKEN_WINDOWED] = of_blocks[0] == SLIDING
    return values


FAMILY = ModelFamily(
    architecture="exaone-moe",
    read_shape=read_shape,
    has_next_token_block=True,
    next_token_layer=next_token_layer,
    hugging_face=HuggingFaceMapping(
        model_type="exaone_moe",
        keys=DECODER_KEYS
        | MOE_KEYS
        | GROUPED_ROUTER_KEYS
        | {
            "feed_forward_length": ("intermediate_size",),
            "expert_shared_count": ("num_shared_experts",),
            n.SLIDING_WINDOW: ("sliding_window",),
        },
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu")},
        layer=DECODER_LAYER | DECODER_QK_NORMS,
        moe=MOE_ROUTER | SHARED_EXPERTS | {n.bias_of_part(n.EXP_PROBS_B): "mlp.e_score_correction_bias"},
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(SHARED_EXPERTS),
        next_token=APART,
        skipped=("mtp.",),
        derived=derived_by(windowed_layers, leading_dense_layers),
    ),
)
