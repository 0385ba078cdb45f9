"""Dense Qwen3.5 and Qwen3.6 (https://huggingface.co/Qwen/Qwen3.5-27B), text only: Qwen3.5-MoE with one feed-forward
per layer instead of experts."""

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
    return read_hybrid_shape(reader, is_tiled=is_tiled, merged_gates=False, has_experts=False)


FAMILY = ModelFamily(
    architecture="qwen35",
    read_shape=read_shape,
    has_next_token_block=True,
    hugging_face=hybrid_mapping(
        "qwen3_5_text",
        SEPARATE_GATES,
        fixed={"attn_output_gate": (True, True)},
        has_experts=False,
        wrapped_in="qwen3_5",  # the published form, with vision
        made=made_tensors,
        metadata={n.SSM_GROUPED: True},
        rotates_in_sections=True,
    ),
)
