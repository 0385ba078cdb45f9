"""Folders of Phi-3 and Phi-4."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.fused_qkv import fused_qkv
from moeserve.models.sources.huggingface.fused_rows import fused_gate_up
from moeserve.models.sources.huggingface.layer_settings import integer
from moeserve.models.sources.huggingface.longrope import longrope, longrope_factors
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.remade import together

THETA: Final = 1e4  # transformers' default
_NOT_FUSED: Final = (n.ATTN_NORM, n.ATTN_OUTPUT, n.FFN_NORM, n.FFN_DOWN)


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE. Raises ModelError for a missing or unsupported setting."""
    return longrope(path, config, MAPPING)


def window(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the window that all layers have, from config.json. Raises ModelError for a missing
    or unsupported setting."""
    if config.get("sliding_window") is None:
        return {}
    return {n.SLIDING_WINDOW: integer(path, config, "sliding_window")}


MAPPING: Final = HuggingFaceMapping(
    model_type="phi3",
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False)},
    layer={n.of_part(part): (DECODER_LAYER | DENSE_FFN)[n.of_part(part)] for part in _NOT_FUSED},
    made=together(fused_qkv("self_attn.qkv_proj"), fused_gate_up("mlp.gate_up_proj")),
    made_of_none=longrope_factors,
    derived=window,
    rope=rope,
    rope_theta=THETA,
    rotates_part=True,
)
