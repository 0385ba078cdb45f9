"""Mellum 2 (https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base): the same network as Qwen3-MoE, except that some
layers have a window, a RoPE base of their own, and no RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    layer_flags,
    number,
    windows_by_period,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.rope_by_kind import check_unscaled, rope_by_kind
from moeserve.models.sources.source import ModelSource

PERIOD: Final = 4  # layers, of which the last has no window, in files with a window and no key for the layers
_WINDOW_THETA: Final = "rope.freq_base_swa"
_ROPES: Final = {  # transformers' defaults
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    A file without a window has none in any layer."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head")
    mixers = [attention] * reader.num_layers
    if reader.has(n.SLIDING_WINDOW):
        mixers = reader.windowed(attention, PERIOD)
    theta = reader.number(_WINDOW_THETA, 2.0, 1e12) if reader.has(_WINDOW_THETA) else None
    router = RouterOptions(scoring="softmax", normalize=reader.flag("expert_weights_norm", default=True))
    ffns = reader.feed_forwards(MoeShape(*reader.experts(), router))
    layers = (
        LayerShape(replace(each, rope_theta=theta, rope_scaled=False) if each.window else each, ffn)
        for each, ffn in zip(mixers, ffns, strict=True)
    )
    return reader.model(tuple(layers))


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have a window, and which have no experts, from config.json. Raises
    ModelError. Without `layer_types` none has a window."""
    layers = integer(path, config, "num_hidden_layers")
    values = windows_by_period(path, config, 1)
    is_dense = layer_flags(path, config, layers, "mlp_layer_types", ("sparse", "dense")) or [False] * layers
    if any(is_dense):
        values["feed_forward_length"] = integer(path, config, "intermediate_size")
    return values | {n.DENSE_LAYERS: np.array(is_dense)}


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE by kind of layer; only layers without a window may have scaled
    RoPE. Raises ModelError for a missing or unsupported setting."""
    given = config if config.get("rope_parameters") else {**config, "rope_parameters": _ROPES}
    full, windowed = rope_by_kind(path, given)
    values = rope_of(path, {**config, "rope_parameters": full}, MAPPING)
    if windowed:
        check_unscaled(path, windowed, SLIDING)
        values[_WINDOW_THETA] = number(path, windowed, "rope_theta", 2.0, 1e12)
    return values


MAPPING: Final = HuggingFaceMapping(
    model_type="mellum",
    keys=DECODER_KEYS
    | MOE_KEYS
    | {"expert_weights_norm": ("norm_topk_prob",), n.SLIDING_WINDOW: ("sliding_window",)},
    defaults={"expert_weights_norm": True, n.SLIDING_WINDOW: 1024},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False)},
    layer=DECODER_LAYER | DECODER_QK_NORMS,
    moe=MOE_ROUTER,
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    skipped=("mtp.",),
    derived=derived,
    rope=rope,
)

FAMILY = ModelFamily("mellum", read_shape, MAPPING)
