"""Trinity, AFMoE (https://huggingface.co/arcee-ai/Trinity-Mini).

Three of four layers have a sliding window; the fourth has full attention without positions. A gate multiplies
attention's output. Norms come before and after each block. The router is DeepSeek-V3's, beside an ungated shared
expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import layer_types, windows_of
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

PERIOD = 4  # layers; if no key says otherwise, the last of them has full attention


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The architecture implies two facts that no key states: embeddings are multiplied by sqrt(hidden), and layers without
    a window have no positions."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head", gate="element")
    seen = reader.windowed(attention, PERIOD)
    placed = [each if each.window else replace(each, has_positions=False) for each in seen]
    mixtures = reader.sigmoid_mixtures(normalize=True)
    layers = [LayerShape(each, ffn, is_sandwiched=True) for each, ffn in zip(placed, mixtures, strict=True)]
    return reader.model(tuple(layers), embedding_scale=reader.hidden_size**0.5)


def windowed_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_types` or `global_attn_every_n_layers`: layers with a window.
    Raises ModelError for a missing or unsupported setting."""
    layers, period = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers")
    if not isinstance(layers, int) or not 1 <= layers <= 1024:
        raise SettingError(path, f"'num_hidden_layers' is {layers!r}; 1 to 1024 is supported")
    types = layer_types(path, config, layers)
    if types is not None:
        return windows_of(types)
    return {} if period is None else {n.WINDOWED_LAYERS: period}


FAMILY = ModelFamily(
    architecture="afmoe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="afmoe",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "feed_forward_length": ("intermediate_size",),
            "expert_shared_count": ("num_shared_experts",),
            "leading_dense_block_count": ("num_dense_layers",),
            "expert_weights_scale": ("route_scale",),
            n.SLIDING_WINDOW: ("sliding_window",),
        },
        # setting: (the only supported value, transformers' default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "attention_bias": (False, False),
            "mup_enabled": (True, False),
            "score_func": ("sigmoid", "sigmoid"),
            "route_norm": (True, True),
            "n_group": (1, 1),
            "num_expert_groups": (1, 1),
        },
        derived=windowed_layers,
        layer={name: theirs for name, theirs in DECODER_LAYER.items() if name != n.of_part(n.FFN_NORM)}
        | DECODER_QK_NORMS
        | {
            n.of_part(n.ATTN_GATE): "self_attn.gate_proj.weight",
            n.of_part(n.POST_ATTENTION_NORM): "post_attention_layernorm.weight",
            n.of_part(n.FFN_NORM): "pre_mlp_layernorm.weight",
            n.of_part(n.POST_FFW_NORM): "post_mlp_layernorm.weight",
        },
        moe=SHARED_EXPERTS
        | {
            n.of_part(n.FFN_GATE_INP): "mlp.router.gate.weight",
            n.bias_of_part(n.EXP_PROBS_B): "mlp.expert_bias",
        },
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(SHARED_EXPERTS),
    ),
)
