"""Folders of Llama 4: the text model of a multimodal one, with experts stored as [expert, in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.expert_matrices import llama4_experts
from moeserve.models.sources.huggingface.layer_settings import integer, layer_flags
from moeserve.models.sources.huggingface.llama3_rope import is_llama3, llama3_rope, rope_factors
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    MOE_EXPERTS,
    HuggingFaceMapping,
)

# transformers' defaults.
THETA: Final = 5e5
PERIOD: Final = 4  # in every group of this many layers, the last has no positions
CHUNK: Final = 8192  # tokens within which layers with positions attend
FLOOR: Final = 8192  # positions from which on layers without positions scale queries


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have experts and positions, and the context length up to which
    attention needs neither chunks nor scaled queries, from config.json. Raises ModelError for a missing or unsupported
    setting."""
    layers = integer(path, config, "num_hidden_layers")
    context = integer(path, config, "max_position_embeddings")
    if config.get("attention_chunk_size", CHUNK) is not None:
        context = min(context, integer(path, config, "attention_chunk_size", CHUNK))
    if config.get("attn_temperature_tuning", True):
        context = min(context, integer(path, config, "floor_scale", FLOOR, low=2) - 1)
    return {
        n.DENSE_LAYERS: np.array(_without_experts(path, config, layers)),
        n.UNROTATED_LAYERS: np.array(_unrotated(path, config, layers)),
        "context_length": context,
    }


def _without_experts(path: Path, config: Mapping[str, Any], layers: int) -> list[bool]:
    listed = config.get("moe_layers")
    if listed is None:
        step = integer(path, config, "interleave_moe_layer_step", 1)
        return [(layer + 1) % step != 0 for layer in range(layers)]
    if not isinstance(listed, list) or any(each not in range(layers) for each in listed):
        raise SettingError(
            path, f"'moe_layers' is {listed!r:.80}; a list of layers below {layers} is expected"
        )
    return [layer not in listed for layer in range(layers)]


def _unrotated(path: Path, config: Mapping[str, Any], layers: int) -> list[bool]:
    listed = None
    if config.get("no_rope_layers"):  # 1 for a layer with positions
        listed = layer_flags(path, config, layers, "no_rope_layers", (1, 0))
    period = integer(path, config, "no_rope_layer_interval", PERIOD)
    return listed or [(layer + 1) % period == 0 for layer in range(layers)]


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, RoPE's settings (Scout's have Llama 3's type). Raises ModelError for a missing or
    unsupported setting."""
    return llama3_rope(path, config, THETA) if is_llama3(config) else rope_of(path, config, MAPPING)


_UNDER: Final = "feed_forward."
SHARED: Final = {
    n.of_part(n.FFN_GATE_SHEXP): f"{_UNDER}shared_expert.gate_proj.weight",
    n.of_part(n.FFN_UP_SHEXP): f"{_UNDER}shared_expert.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): f"{_UNDER}shared_expert.down_proj.weight",
}
MAPPING: Final = HuggingFaceMapping(
    model_type="llama4_text",
    wrapped_in="llama4",
    keys=DECODER_KEYS
    | {
        "expert_count": ("num_local_experts",),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("intermediate_size",),
        "feed_forward_length": ("intermediate_size_mlp",),
        n.HAS_QK_NORM: ("use_qk_norm",),
    },
    defaults={n.HAS_QK_NORM: True},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False)},
    layer=DECODER_LAYER,
    moe=SHARED | {n.of_part(n.FFN_GATE_INP): f"{_UNDER}router.weight"},
    dense={
        n.of_part(n.FFN_GATE): f"{_UNDER}gate_proj.weight",
        n.of_part(n.FFN_UP): f"{_UNDER}up_proj.weight",
        n.of_part(n.FFN_DOWN): f"{_UNDER}down_proj.weight",
    },
    experts=MOE_EXPERTS,  # quantised checkpoints have separate matrices for each expert
    experts_under=f"{_UNDER}experts",
    derived=derived,
    rope=rope,
    rope_theta=THETA,
    made=llama4_experts,
    made_of_none=rope_factors,
)
