"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783), Mistral, SmolLM and similar dense models; Mixtral
(https://arxiv.org/abs/2401.04088), with experts chosen by a softmax.

Checkpoints rotate split halves of a head; llama.cpp's converter reorders the rows of q and k into pairs of
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import integer
from moeserve.models.sources.huggingface.llama3_rope import is_llama3, llama3_rope, rope_factors
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    OUTPUT_BIAS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

THETA = 10000.0  # default; files of Llama 2 do not state it


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(),
        qkv_bias=reader.qkv_bias(),
        output_bias=reader.output_bias(),
        has_rope_factors=n.ROPE_FREQS in source.tensors,
        in_pairs=not reader.flag(n.ROPE_HALVES, default=False),
    )
    ffn: MoeShape | DenseFfnShape
    if reader.integer("expert_count", 0, 4096, default=0):
        ffn = MoeShape(*reader.experts("feed_forward_length"), RouterOptions(scoring="softmax"))
    else:
        ffn = DenseFfnShape(reader.dense_width())
    layers = tuple(LayerShape(seen, ffn) for seen in reader.windowed(attention))
    return reader.model(layers, rope_theta=THETA)


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, Mixtral's experts, and a window that all layers have. Raises
    ModelError."""
    values: dict[str, MetadataValue] = {}
    if config.get("model_type") == "mixtral":
        for ours, theirs in (
            ("expert_count", "num_local_experts"),
            ("expert_used_count", "num_experts_per_tok"),
        ):
            if not isinstance(config.get(theirs), int):
                raise SettingError(path, f"{theirs!r} is missing")
            values[ours] = config[theirs]
    window = config.get("sliding_window")
    if window is not None:
        layers = integer(path, config, "num_hidden_layers")
        values |= {n.SLIDING_WINDOW: window, n.WINDOWED_LAYERS: np.ones(layers, np.bool_)}
    return values


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, RoPE's settings, including Llama 3's type. Raises ModelError for a missing or
    unsupported setting."""
    return llama3_rope(path, config, THETA) if is_llama3(config) else rope_of(path, config, MAPPING)


MAPPING = HuggingFaceMapping(
    model_type="llama",
    other_model_types=("mistral", "mixtral"),
    wrapped_in="mistral3",
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",), n.HAS_QKV_BIAS: ("attention_bias",)},
    defaults={n.HAS_QKV_BIAS: False},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "mlp_bias": (False, False)},
    layer=DECODER_LAYER | DECODER_BIASES | OUTPUT_BIAS,
    moe={n.of_part(n.FFN_GATE_INP): "block_sparse_moe.gate.weight"},
    dense=DENSE_FFN,
    experts={
        n.of_part(n.FFN_GATE_EXPS): "w1.weight",
        n.of_part(n.FFN_UP_EXPS): "w3.weight",
        n.of_part(n.FFN_DOWN_EXPS): "w2.weight",
    },
    experts_under="block_sparse_moe.experts",
    optional=frozenset(DECODER_BIASES | OUTPUT_BIAS),
    derived=derived,
    rope=rope,
    rope_theta=THETA,
    made_of_none=rope_factors,
    metadata={n.ROPE_HALVES: True},
)

FAMILY = ModelFamily(architecture="llama", read_shape=read_shape, hugging_face=MAPPING)
