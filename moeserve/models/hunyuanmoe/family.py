"""Hunyuan-A13B (https://huggingface.co/tencent/Hunyuan-A13B-Instruct): q and k are normalised per head after RoPE;
every layer has experts, chosen by a softmax, and an ungated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    HEAD_DIM,
    MOE_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    RoPE scaling for long contexts needs no key: the converter has already applied it to the RoPE base."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head", norm_after=True)
    width = reader.integer("expert_shared_feed_forward_length", 0, 1 << 16, default=0)
    reader.integer("expert_shared_count", 0, 64, default=0)  # the width above includes all of them
    moe = MoeShape(
        *reader.experts(),
        RouterOptions(scoring="softmax"),
        shared=SharedExpert(width, is_gated=False) if width else None,
    )
    return reader.model((LayerShape(attention, moe),) * reader.num_layers)


def stretched_rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE scaling: type "dynamic" with an `alpha` means a larger RoPE base
    at every length. Raises ModelError for a missing or unsupported setting."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(given, dict) or given.get("rope_type", given.get("type")) != "dynamic":
        return rope_of(path, config, FOLDER)
    theta = given.get("rope_theta", config.get("rope_theta"))
    dim = config.get("head_dim") or config.get("attention_head_dim")
    alpha = given.get("alpha")
    for name, value, least in (("alpha", alpha, 0), ("rope_theta", theta, 0), ("head_dim", dim, 2)):
        if not isinstance(value, int | float) or not least < value <= 1e12:
            raise SettingError(
                path,
                f"{name!r} of rope_type 'dynamic' is {value!r:.80}; a number above {least} is expected",
            )
    assert isinstance(alpha, int | float)
    assert isinstance(theta, int | float)
    assert isinstance(dim, int | float)
    return {"rope.freq_base": float(theta * alpha ** (dim / (dim - 2)))}


def same_in_all_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the settings that may be lists with an entry per layer; all entries must be equal.
    Raises ModelError for a missing or unsupported setting."""
    values: dict[str, MetadataValue] = {}
    for ours, names in _BY_LAYER.items():
        name = next((name for name in names if config.get(name) is not None), names[0])
        value = config.get(name)
        listed = value if isinstance(value, list) else [value]
        first = listed[0] if listed else None
        if not isinstance(first, int) or any(each != first for each in listed):
            raise SettingError(
                path, f"{name!r} is {value!r:.80}; a number, the same of all layers, is expected"
            )
        values[ours] = first
    shared = config.get("num_shared_expert", 1)
    count = (
        shared[0] if isinstance(shared, list) and shared and shared == shared[:1] * len(shared) else shared
    )
    if not isinstance(count, int) or not 0 <= count <= 64:
        raise SettingError(
            path, f"'num_shared_expert' is {shared!r:.80}; 0 to 64, the same of all layers, is expected"
        )
    width = values["expert_feed_forward_length"]
    assert isinstance(width, int)
    return values | {"expert_shared_feed_forward_length": count * width}


_BY_LAYER = {
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("moe_topk", "num_experts_per_tok"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
}
FOLDER = HuggingFaceMapping(
    model_type="hunyuan_v1_moe",
    keys=DECODER_KEYS | {HEAD_DIM: ("head_dim", "attention_head_dim")},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "use_cla": (False, False),
        "use_qk_norm": (True, True),
        "use_mixed_mlp_moe": (True, True),
        "norm_topk_prob": (True, True),
        "moe_layer_num_skipped": (0, 0),
    },
    derived=same_in_all_layers,
    rope=stretched_rope,
    layer=DECODER_LAYER
    | {
        n.of_part(n.ATTN_Q_NORM): "self_attn.query_layernorm.weight",
        n.of_part(n.ATTN_K_NORM): "self_attn.key_layernorm.weight",
    },
    moe={
        n.of_part(n.FFN_GATE_INP): "mlp.gate.wg.weight",
        n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_mlp.gate_proj.weight",
        n.of_part(n.FFN_UP_SHEXP): "mlp.shared_mlp.up_proj.weight",
        n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_mlp.down_proj.weight",
    },
    experts=MOE_EXPERTS,
)
FAMILY = ModelFamily(architecture="hunyuan-moe", read_shape=read_shape, hugging_face=FOLDER)
