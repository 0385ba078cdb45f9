"""Ling 1 (https://arxiv.org/abs/2503.05139): Ling-lite and Ling-plus, which llama.cpp calls bailingmoe.

Every layer has experts, chosen by a softmax, and ungated shared experts. q and k are not normalised, and the whole head
rotates. Attention's q, k and v are one tensor of a checkpoint. Ling-plus divides each column of its output matrix by
the column's length; llama.cpp's converter does so too, so that a GGUF holds the quotient.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
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
from moeserve.models.sources.huggingface.remade import Remade, made_by, made_where, outside
from moeserve.models.sources.source import ModelSource

ARCHITECTURE: Final = "bailingmoe"
NORM_HEAD: Final = "norm_head"  # of folders: the output matrix is stored with columns of any length
HEAD: Final = "lm_head.weight"
EPSILON: Final = 1e-7  # added to a column's length, as by llama.cpp's converter


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qk_norm="none", in_pairs=not reader.flag(n.ROPE_HALVES, default=False)
    )
    num_experts, top_k, width = reader.experts()
    count = reader.integer("expert_shared_count", 0, 64, default=0)
    router = RouterOptions(
        scoring="softmax",
        normalize=reader.flag("expert_weights_norm", default=False),
        scale=reader.number("expert_weights_scale", 0.0, 1e6, default=0.0) or 1.0,
    )
    shared = SharedExpert(count * width, is_gated=False) if count else None
    moe = MoeShape(num_experts, top_k, width, router, shared)
    reader.only("leading_dense_block_count", 0)
    return reader.model((LayerShape(attention, moe),) * reader.num_layers)


def of_length_one(matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns a matrix, float32 [rows, columns], with each column divided by its length."""
    lengths: npt.NDArray[np.float32] = np.linalg.norm(matrix, axis=0)
    return matrix / (lengths + np.float32(EPSILON))


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
        made_outside=outside(
            made_where(
                f"{ARCHITECTURE}.{NORM_HEAD}",
                made_by(Remade(n.OUTPUT, HEAD, lambda shape: shape, of_length_one)),
            )
        ),
        metadata={n.ROPE_HALVES: True},
        renamed={"model.word_embeddings.": "model.embed_tokens."},
    ),
)
