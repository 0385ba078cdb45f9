"""SmolLM3 (https://huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama's blocks; every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import integer, layer_flags
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

PERIOD: Final = 4  # of this many layers the last has no positions
THETA: Final = 2e6  # transformers' default


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    No key of a GGUF says which layers have no positions."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), in_pairs=not reader.flag(n.ROPE_HALVES, default=False))
    dense = DenseFfnShape(reader.dense_width())
    unrotated = reader.optional_flags(n.UNROTATED_LAYERS) or [
        (index + 1) % PERIOD == 0 for index in range(reader.num_layers)
    ]
    return reader.model(
        tuple(LayerShape(replace(attention, has_positions=not without), dense) for without in unrotated)
    )


def unrotated_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `no_rope_layers` (1 for a layer with positions), or
    `no_rope_layer_interval`. Raises ModelError for a missing or unsupported setting."""
    layers = integer(path, config, "num_hidden_layers")
    period = integer(path, config, "no_rope_layer_interval", PERIOD)
    listed = layer_flags(path, config, layers, "no_rope_layers", (1, 0))
    return {n.UNROTATED_LAYERS: np.array(listed or [(each + 1) % period == 0 for each in range(layers)])}


MAPPING: Final = HuggingFaceMapping(
    model_type="smollm3",
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), (False, False)),
    },
    layer=DECODER_LAYER,
    dense=DENSE_FFN,
    metadata={n.ROPE_HALVES: True},
    derived=unrotated_layers,
    rope_theta=THETA,
    tied_by_default=True,
)
FAMILY = ModelFamily(architecture="smollm3", read_shape=read_shape, hugging_face=MAPPING)
