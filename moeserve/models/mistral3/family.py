"""Ministral 3 and Devstral Small 2 (https://huggingface.co/mistralai/Ministral-3-8B-Instruct-2512), text only: Llama's
blocks with YaRN. llama.cpp's files of Mistral Small 3 have this architecture too, without YaRN.

Past YaRN's original context the model multiplies queries by a factor that grows with the position. moeserve does not
compute that factor, so longer contexts are not served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import number
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

TEMPERATURE: Final = "attention.temperature_scale"
_MAGNITUDES: Final = ("mscale", "mscale_all_dim")


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), in_pairs=not reader.flag(n.ROPE_HALVES, default=False))
    layer = LayerShape(attention, DenseFfnShape(reader.dense_width()))
    scaling = reader.rope_scaling()
    is_scaled = reader.number(TEMPERATURE, 0.0, 1e3, default=0.0) > 0
    if is_scaled and scaling.type != "yarn":
        raise reader.error(
            TEMPERATURE, "is set, and rope.scaling.type is not yarn, whose context it begins at"
        )
    shape = reader.model((layer,) * reader.num_layers, rope_scaling=_with_magnitude(reader, scaling))
    if not is_scaled:
        return shape
    return replace(shape, context_length=min(shape.context_length, scaling.original_context_length))


def _with_magnitude(reader: ShapeReader, scaling: RopeScaling) -> RopeScaling:
    """Returns the scaling in which YaRN's factor on cos and sin is divided by the factor of all dimensions. The key
    holds the latter's `mscale`; the other `mscale` is 1, as in llama.cpp. Where both are 1 nothing is left."""
    if scaling.type != "yarn":
        return scaling
    of_all = 1.0 + 0.1 * reader.number(n.YARN_LOG_MULTIPLIER, 0.0, 10.0, default=0.0) * math.log(
        scaling.factor
    )
    return replace(scaling, attn_factor=scaling.attn_factor / of_all)


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE. Raises ModelError for a missing or unsupported setting."""
    values = rope_of(path, config, MAPPING)
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if values.get("rope.scaling.type") != "yarn":
        return values
    if given.get("mscale_all_dim"):
        if given.get("mscale") != 1:
            raise SettingError(path, f"'mscale' is {given.get('mscale')!r}; only 1 is supported")
        values[n.YARN_LOG_MULTIPLIER] = number(path, given, "mscale_all_dim", 0.0, 10.0)
        if given.get("attention_factor") is not None:
            raise SettingError(path, "'attention_factor' beside 'mscale' is not supported")
    return values | {TEMPERATURE: number(path, given, "llama_4_scaling_beta", 0.0, 1e3, default=0.0)}


MAPPING: Final = HuggingFaceMapping(
    model_type="ministral3",
    wrapped_in="mistral3",
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "sliding_window": (None, None)},
    layer=DECODER_LAYER,
    dense=DENSE_FFN,
    metadata={n.ROPE_HALVES: True},
    rope=rope,
    rope_theta=1e6,
    rope_settings=frozenset({*_MAGNITUDES, "llama_4_scaling_beta", "max_position_embeddings"}),
)
FAMILY = ModelFamily(architecture="mistral3", read_shape=read_shape, hugging_face=MAPPING)
