"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and 4.7 (https://arxiv.org/abs/2508.06471), and the text of GLM-4.5V and 4.6V; Solar
Open (https://huggingface.co/upstage/Solar-Open-100B), in which all layers have experts and whole heads rotate.

The first layers have no experts. The router has sigmoid scores with a choice bias; the shared expert is ungated. Half
of each head rotates; with vision by three positions. The last layer in the file predicts a further token (MTP) and is
loaded only if it drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    GROUPED_ROUTER_KEYS,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
    renamed,
)
from moeserve.models.sources.huggingface.next_token_names import BEHIND_LAYERS
from moeserve.models.sources.source import ModelSource

SOLAR: Final = "solar_open"


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The tensors, not a key, say whether q and k have norms (GLM-4.6 does, the Air does not) or biases."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        qk_norm="head" if n.of_layer(0, n.ATTN_Q_NORM) in source.tensors else "none",
        qkv_bias=n.bias_of_layer(0, n.ATTN_Q) in source.tensors,
        rotated=reader.rotated(head_dim),
    )
    num_experts, top_k, width = reader.experts()
    count = reader.integer("expert_shared_count", 0, 64, default=0)
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        reader.sigmoid_router(num_experts, top_k),
        shared=SharedExpert(count * width, is_gated=False) if count else None,
        choice_bias=True,
    )
    num_dense = reader.integer("leading_dense_block_count", 0, reader.num_layers, default=0)
    dense = DenseFfnShape(reader.dense_width()) if num_dense else None
    layers = tuple(
        LayerShape(attention, dense if dense and index < num_dense else moe, n.POST_ATTENTION_NORM)
        for index in range(reader.num_layers)
    )
    sections = reader.rope_sections(attention.rotary_dim, in_blocks=True)
    return reader.model(layers, rope_sections=sections, sections_in_blocks=sections is not None)


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the metadata of RoPE that config.json's settings mean. Raises ModelError for a missing or unsupported
    setting. Solar Open's settings need not state that whole heads rotate."""
    whole = {"partial_rotary_factor": 1.0, "rope_theta": 1e6} if config.get("model_type") == SOLAR else {}
    given = {name: value for name, value in config.items() if value is not None}
    return rope_of(path, {**whole, **given}, MAPPING)


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for a Solar Open of another form than transformers computes, which ignores these settings."""
    if config.get("model_type") != SOLAR:
        return
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = scaling.get("partial_rotary_factor") if isinstance(scaling, dict) else None
    for name, value, supported in (
        ("first_k_dense_replace", config.get("first_k_dense_replace"), 0),
        ("partial_rotary_factor", config.get("partial_rotary_factor"), 1.0),
        ("partial_rotary_factor", share, 1.0),
        ("use_qk_norm", config.get("use_qk_norm"), False),
    ):
        if value is not None and value != supported:
            raise SettingError(path, f"{name!r} is {value!r:.80}; only {supported!r} is supported")


MAPPING: Final = HuggingFaceMapping(
    model_type="glm4_moe",
    other_model_types=("glm4v_moe_text", SOLAR),
    wrapped_in="glm4v_moe",  # GLM-4.5V and 4.6V, with vision
    keys=DECODER_KEYS
    | MOE_KEYS
    | GROUPED_ROUTER_KEYS
    | {
        "feed_forward_length": ("intermediate_size",),
        "expert_count": ("n_routed_experts", "num_experts"),
        "expert_shared_count": ("n_shared_experts",),
        "leading_dense_block_count": ("first_k_dense_replace",),
    },
    # Solar Open has no layers without experts, and its published config.json no groups.
    defaults={"feed_forward_length": 0, "expert_group_count": 1, "expert_group_used_count": 1},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu")},
    check=check,
    rope=rope,
    layer=renamed(DECODER_LAYER, {n.FFN_NORM: n.POST_ATTENTION_NORM}) | DECODER_BIASES | DECODER_QK_NORMS,
    moe=MOE_ROUTER | SHARED_EXPERTS | {n.bias_of_part(n.EXP_PROBS_B): "mlp.gate.e_score_correction_bias"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    optional=frozenset(DECODER_BIASES | DECODER_QK_NORMS | SHARED_EXPERTS),
    rotates_part=True,
    rotates_in_sections=True,
    sections_in_blocks=True,
    next_token=BEHIND_LAYERS,
    skipped_layers=("num_nextn_predict_layers", "num_mtp_layers"),
)

FAMILY = ModelFamily("glm4moe", read_shape, MAPPING, has_next_token_block=True)
