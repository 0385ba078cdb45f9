"""GLM-4-9B-0414, GLM-4-32B-0414 and GLM-Z1 (https://huggingface.co/zai-org/GLM-4-32B-0414), and the text of GLM-4.1V
(https://arxiv.org/abs/2507.01006) and GLM-OCR: models without experts. Norms come before and after each block; half of
each head rotates, in pairs of neighbouring dimensions; gate and up are one tensor.

With vision, positions have three numbers. llama.cpp's converter then reorders the rows of q and k from pairs to halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.fused_rows import fused_gate_up
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

THETA: Final = 1e4  # transformers' default
# The text's model_type in models with vision -> whether q, k and v have biases.
BIASED: Final = {"glm4v_text": True, "glm_ocr_text": False}


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The tensors of a GGUF say whether q, k and v have biases: they do in the smaller model and in GLM-4.1V."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    rotated = reader.rotated(head_dim)
    sections = reader.rope_sections(rotated, in_blocks=True)
    attention = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias=reader.qkv_bias(),
        rotated=rotated,
        in_pairs=not reader.flag(n.ROPE_HALVES, default=sections is not None),
    )
    layer = LayerShape(attention, DenseFfnShape(reader.dense_width()), is_sandwiched=True)
    return reader.model(
        (layer,) * reader.num_layers, rope_sections=sections, sections_in_blocks=sections is not None
    )


def biases(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the setting that says whether q, k and v have biases, from config.json. Raises
    ModelError. Models with vision lack this setting: GLM-4.1V has biases, GLM-OCR has none."""
    kind = config.get("model_type")
    if kind in BIASED:
        return {n.HAS_QKV_BIAS: BIASED[kind]}
    value = config.get("attention_bias", True)
    if not isinstance(value, bool):
        raise SettingError(path, f"'attention_bias' is {value!r:.80}; true or false is expected")
    return {n.HAS_QKV_BIAS: value}


FAMILY = ModelFamily(
    architecture="glm4",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="glm4",
        other_model_types=tuple(BIASED),
        wrapped_in="glm4v",
        other_wrappers=("glm_ocr",),
        keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
        fixed={"hidden_act": ("silu", "silu")},  # setting: (the only supported value, transformers' default)
        layer=DECODER_LAYER
        | DECODER_BIASES
        | {
            n.of_part(n.POST_ATTENTION_NORM): "post_self_attn_layernorm.weight",
            n.of_part(n.FFN_DOWN): DENSE_FFN[n.of_part(n.FFN_DOWN)],
            n.of_part(n.POST_FFW_NORM): "post_mlp_layernorm.weight",
        },
        optional=frozenset(DECODER_BIASES),
        made=fused_gate_up("mlp.gate_up_proj"),
        derived=biases,
        metadata={n.ROPE_HALVES: False},
        rotates_part=True,
        rotates_in_sections=True,
        sections_in_blocks=True,
        rope_theta=THETA,
        skipped_layers=("num_nextn_predict_layers",),
    ),
)
