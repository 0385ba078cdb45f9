"""Ling 1 (https://arxiv.org/abs/2503.05139): Ling-lite and Ling-plus, which llama.cpp calls bailingmoe.

Every layer has experts, chosen by a softmax, and ungated shared experts. q and k are not normalised, and the whole head
rotates. Attention's q, k and v are one tensor of a checkpoint. Ling-plus divides each column of its output matrix by
the column's length; llama.cpp's converter does so too, so that a GGUF holds the quotient.
"""

from __future__ import annotations

from typing import Final

from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.llama_experts import llama_with_experts
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.fused_qkv import fused_qkv
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.remade import head_of_unit_columns
from moeserve.models.sources.source import ModelSource

ARCHITECTURE: Final = "bailingmoe"
NORM_HEAD: Final = "norm_head"  # of folders: the output matrix is stored with columns of any length
EPSILON: Final = 1e-7  # added to a column's length, as by llama.cpp's converter


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention, moe = llama_with_experts(reader)
    reader.only("leading_dense_block_count", 0)
    return reader.model((LayerShape(attention, moe),) * reader.num_layers)


FAMILY = ModelFamily(
    architecture=ARCHITECTURE,
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="bailing_moe",
        architectures=("BailingMoeForCausalLM",),
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "expert_shared_count": ("num_shared_experts",),
            "expert_weights_norm": ("norm_topk_prob",),
            NORM_HEAD: ("norm_head",),
        },
        defaults={"expert_weights_norm": True, NORM_HEAD: False},
        # setting: (the only supported value, the default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "first_k_dense_replace": (0, 0),
            **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_softmax", "multi_gate"), (False, False)),
        },
        layer={
            n.of_part(n.ATTN_NORM): "input_layernorm.weight",
            n.of_part(n.ATTN_OUTPUT): "attention.dense.weight",
            n.of_part(n.FFN_NORM): "post_attention_layernorm.weight",
        },
        moe=MOE_ROUTER | SHARED_EXPERTS,
        experts=MOE_EXPERTS,
        optional=frozenset(SHARED_EXPERTS),
        made=fused_qkv("attention.query_key_value"),
        made_outside=head_of_unit_columns(f"{ARCHITECTURE}.{NORM_HEAD}", EPSILON),
        metadata={n.ROPE_HALVES: True},
        renamed={"model.word_embeddings.": "model.embed_tokens."},
    ),
)
