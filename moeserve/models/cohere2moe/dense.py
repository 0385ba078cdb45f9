"""Command R7B, Command A and Aya (https://huggingface.co/CohereLabs/c4ai-command-r7b-12-2024): the same network as
North Mini Code, without experts. Layers with a window have RoPE, the others have no positions. Norms are LayerNorm
without a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.cohere2moe.hugging_face import LAYER_NORM_EPS, MAPPING, PERIOD
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    integer,
    windows_by_period,
)
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, DENSE_FFN
from moeserve.models.sources.source import ModelSource

LOGIT_SCALE = 0.0625  # transformers' default


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), in_pairs=True)
    mixers = (
        each if each.window else replace(each, has_positions=False)
        for each in reader.windowed(attention, PERIOD)
    )
    dense = DenseFfnShape(reader.dense_width())
    shape = reader.model(
        tuple(LayerShape(mixer, dense, is_parallel=True) for mixer in mixers),
        rms_eps=reader.number(n.LAYER_NORM_EPS, 1e-12, 1e-2),
        logit_scale=reader.number("logit_scale", 0.0, 1e6, default=1.0) or 1.0,
    )
    return replace(shape, centers_norms=True)


def windowed_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have windows, from config.json. Raises ModelError for a missing or
    unsupported setting."""
    return windows_by_period(path, config, integer(path, config, "sliding_window_pattern", PERIOD))


FAMILY = ModelFamily(
    architecture="cohere2",
    read_shape=read_shape,
    hugging_face=replace(
        MAPPING,
        model_type="cohere2",
        keys={ours: theirs for ours, theirs in DECODER_KEYS.items() if ours != n.RMS_EPS}
        | {
            "feed_forward_length": ("intermediate_size",),
            "logit_scale": ("logit_scale",),
            n.LAYER_NORM_EPS: ("layer_norm_eps",),
            n.SLIDING_WINDOW: ("sliding_window",),
        },
        defaults={"logit_scale": LOGIT_SCALE, n.LAYER_NORM_EPS: LAYER_NORM_EPS, n.SLIDING_WINDOW: 4096},
        fixed={
            name: MAPPING.fixed[name]
            for name in ("hidden_act", "attention_bias", "use_qk_norm", "rotary_pct")
        },
        layer=dict(MAPPING.layer) | DENSE_FFN,
        moe={},
        dense={},
        experts={},
        derived=windowed_layers,
        skipped_layers=(),
    ),
)
