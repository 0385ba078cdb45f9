"""Hunyuan without experts (https://huggingface.co/tencent/Hunyuan-7B-Instruct), Hunyuan-MT: as Hunyuan-A13B, with one
feed-forward in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.hunyuanmoe.family import FOLDER as FOLDER_OF_EXPERTS
from moeserve.models.hunyuanmoe.family import stretched_rope
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.mapping import DENSE_FFN
from moeserve.models.sources.source import ModelSource

THETA = 10000.0  # default


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head", norm_after=True)
    return reader.model((LayerShape(attention, DenseFfnShape(reader.dense_width())),) * reader.num_layers)


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE as with experts. Raises ModelError for a missing or unsupported
    setting."""
    return stretched_rope(path, {**config, "rope_theta": config.get("rope_theta") or THETA})


FAMILY = ModelFamily(
    architecture="hunyuan-dense",
    read_shape=read_shape,
    hugging_face=replace(
        FOLDER_OF_EXPERTS,
        model_type="hunyuan_v1_dense",
        keys=dict(FOLDER_OF_EXPERTS.keys) | {"feed_forward_length": ("intermediate_size",)},
        fixed={
            name: FOLDER_OF_EXPERTS.fixed[name]
            for name in ("hidden_act", "attention_bias", "mlp_bias", "use_cla", "use_qk_norm")
        },
        derived=None,
        rope=rope,
        layer=dict(FOLDER_OF_EXPERTS.layer) | DENSE_FFN,
        moe={},
        experts={},
    ),
)
