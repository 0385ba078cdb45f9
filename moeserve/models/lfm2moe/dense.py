"""LFM2 and LFM2.5 without experts (https://huggingface.co/LiquidAI/LFM2-1.2B): like the models with experts, with one
feed-forward in each layer instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.lfm2moe.family import FAMILY as LFM2_MOE
from moeserve.models.lfm2moe.family import MIXERS, kv_heads_by_layer, mixers
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import derived_by, integer, number
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS
from moeserve.models.sources.source import ModelSource

_MAPPING = LFM2_MOE.hugging_face
assert _MAPPING is not None


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    dense = DenseFfnShape(reader.dense_width())
    return reader.model(tuple(LayerShape(mixer, dense) for mixer in mixers(reader)))


def feed_forward_width(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the feed-forward's width, of which `block_auto_adjust_ff_dim` takes two thirds,
    rounded up, from config.json. Raises ModelError for a missing or unsupported setting."""
    width = integer(
        path, config, "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    )
    if config.get("block_auto_adjust_ff_dim", True):
        multiple = integer(path, config, "block_multiple_of", 256)
        factor = number(path, config, "block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0)
        width = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    return {"feed_forward_length": width}


FAMILY = ModelFamily(
    architecture="lfm2",
    read_shape=read_shape,
    hugging_face=replace(
        _MAPPING,
        model_type="lfm2",
        keys=DECODER_KEYS
        | {
            "attention.layer_norm_rms_epsilon": ("norm_eps",),
            "shortconv.l_cache": ("conv_L_cache",),
        },
        layer=dict(_MAPPING.layer) | dict(_MAPPING.dense),
        moe={},
        dense={},
        experts={},
        optional=frozenset(MIXERS),
        derived=derived_by(kv_heads_by_layer, feed_forward_width),
    ),
)
