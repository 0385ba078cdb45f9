"""Code shared by Qwen3-Next and its successors: three of four layers are a gated DeltaNet, the fourth is gated
attention; partial rotation; a shared expert with a sigmoid gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.recurrent_heads import delta_heads
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.delta_net import DELTA_KEYS, DELTA_LAYER, LESS_ONE, recurrent_layers
from moeserve.models.sources.huggingface.layer_settings import Derived
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    OUTPUT_BIAS,
    SHARED_EXPERT,
    HuggingFaceMapping,
    renamed,
)
from moeserve.models.sources.huggingface.next_token_names import APART

# Matrices of Qwen3.5's recurrent layers, by GGUF names within a layer; Qwen3-Next has fewer, merged ones.
SEPARATE_GATES = {
    n.of_part(n.ATTN_QKV): "linear_attn.in_proj_qkv.weight",
    n.of_part(n.ATTN_GATE): "linear_attn.in_proj_z.weight",
    n.of_part(n.SSM_BETA): "linear_attn.in_proj_b.weight",
    n.of_part(n.SSM_ALPHA): "linear_attn.in_proj_a.weight",
}
_MOE_KEYS = MOE_KEYS | {"expert_shared_feed_forward_length": ("shared_expert_intermediate_size",)}


def read_hybrid_shape(
    reader: ShapeReader, *, is_tiled: bool, merged_gates: bool, has_experts: bool = True
) -> ModelShape:
    """Reads the model's shape from the metadata, and returns it. Raises ModelError for a missing or unsupported
    setting. is_tiled: the file stores the first value head of every key head, then the second ones, and so on.
    merged_gates: one matrix computes beta and alpha. has_experts: some layers have experts."""
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        qk_norm="head",
        qkv_bias=reader.qkv_bias(),
        output_bias=reader.output_bias(),
        rotated=reader.rotated(head_dim),
        gate="in_q",
    )
    recurrence = GatedDeltaNetShape(delta_heads(reader, is_tiled=is_tiled), merged_gates=merged_gates)
    feed_forwards = (
        _mixtures(reader) if has_experts else [DenseFfnShape(reader.dense_width())] * reader.num_layers
    )
    return reader.model(
        tuple(
            LayerShape(recurrence if is_recurrent else attention, ffn, ffn_norm=n.POST_ATTENTION_NORM)
            for is_recurrent, ffn in zip(reader.recurrent_layers(), feed_forwards, strict=True)
        ),
        rope_sections=reader.rope_sections(attention.rotary_dim),
    )


def _mixtures(reader: ShapeReader) -> Sequence[MoeShape | DenseFfnShape]:
    shared = SharedExpert(reader.integer("expert_shared_feed_forward_length", 1, 1 << 16), is_gated=True)
    router = RouterOptions(scoring="softmax", normalize=reader.flag("expert_weights_norm", default=True))
    return reader.feed_forwards(MoeShape(*reader.experts(), router, shared))


def hybrid_mapping(
    model_type: str,
    recurrence: dict[str, str],
    *,
    keys: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    defaults: Mapping[str, bool] = MappingProxyType({}),
    fixed: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
    derived: Derived = recurrent_layers,
    has_experts: bool = True,
    **more: Any,
) -> HuggingFaceMapping:
    """Returns the mapping of checkpoints. recurrence: tensor names of a recurrent layer beyond DELTA_LAYER's, by
    GGUF name. has_experts: some layers have experts. The other arguments are fields of HuggingFaceMapping."""
    of_delta_net = DELTA_LAYER | recurrence
    of_attention = DECODER_LAYER | DECODER_QK_NORMS | DECODER_BIASES | OUTPUT_BIAS
    return HuggingFaceMapping(
        model_type=model_type,
        keys=DECODER_KEYS
        | (_MOE_KEYS if has_experts else {"feed_forward_length": ("intermediate_size",)})
        | DELTA_KEYS
        | {n.HAS_QKV_BIAS: ("attention_bias",), **keys},
        defaults={n.HAS_QKV_BIAS: False, **defaults},
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu"), **fixed},
        layer=renamed(of_attention, {n.FFN_NORM: n.POST_ATTENTION_NORM}) | of_delta_net,
        moe=MOE_ROUTER | SHARED_EXPERT if has_experts else {},
        dense=DENSE_FFN,
        experts=MOE_EXPERTS if has_experts else {},
        # A layer has either attention's tensors or the DeltaNet's.
        optional=frozenset(of_attention.keys() | of_delta_net.keys()),
        less_one=LESS_ONE,
        next_token=APART,
        skipped=("mtp.",),
        derived=derived,
        rotates_part=True,
        flattened=frozenset(
            {n.of_part(n.FFN_GATE_INP_SHEXP)}
        ),  # [1, hidden] in the checkpoint, a vector in GGUF
        **more,
    )
