"""Qwen3-Next and Qwen3-Coder-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct).

llama.cpp's converter adds 1 to every norm's weight except the DeltaNet's, and keeps value heads in the checkpoint's
order.
"""

from __future__ import annotations

from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.qwen_hybrid import hybrid_mapping, read_hybrid_shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.delta_net import made_tensors_of_merged, recurrent_layers
from moeserve.models.sources.huggingface.layer_settings import derived_by, sparse_layers
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    return read_hybrid_shape(ShapeReader(source), is_tiled=False, merged_gates=True)


FAMILY = ModelFamily(
    architecture="qwen3next",
    read_shape=read_shape,
    has_next_token_block=True,
    hugging_face=hybrid_mapping(
        "qwen3_next",
        {n.of_part(n.SSM_BA): "linear_attn.in_proj_ba.weight"},
        keys={"expert_weights_norm": ("norm_topk_prob",)},
        defaults={"expert_weights_norm": True},
        derived=derived_by(recurrent_layers, sparse_layers),
        made=made_tensors_of_merged,
    ),
)
