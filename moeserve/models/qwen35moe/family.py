"""Qwen3.5-MoE and Qwen3.6-MoE (https://huggingface.co/Qwen/Qwen3.5-35B-A3B): Qwen3-Next with next-token layers at
the end.

In a GGUF, value heads are tiled (the first one of each key head, then the second ones); checkpoints group them by
key head. Rotary positions have sections for pictures; a text's positions are equal in all sections, which is
ordinary RoPE.
"""

from __future__ import annotations

from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.qwen_hybrid import SEPARATE_GATES, hybrid_mapping, read_hybrid_shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.delta_net import made_tensors
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    is_tiled = not reader.flag(n.SSM_GROUPED, default=False)
    return read_hybrid_shape(reader, is_tiled=is_tiled, merged_gates=False)


FAMILY = ModelFamily(
    architecture="qwen35moe",
    read_shape=read_shape,
    has_next_token_block=True,
    hugging_face=hybrid_mapping(
        "qwen3_5_moe_text",
        SEPARATE_GATES,
        fixed={"attn_output_gate": (True, True)},
        wrapped_in="qwen3_5_moe",  # the published form, with vision
        made=made_tensors,
        metadata={n.SSM_GROUPED: True},
        rotates_in_sections=True,
    ),
)
