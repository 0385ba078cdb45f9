"""The supported architectures; the only list of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeserve.models.afmoe.family import FAMILY as AFMOE
from moeserve.models.bailingmoe2.family import FAMILY as BAILINGMOE2
from moeserve.models.bailingmoe3.family import FAMILY as BAILINGMOE3
from moeserve.models.cohere2moe.dense import FAMILY as COHERE2
from moeserve.models.cohere2moe.family import FAMILY as COHERE2_MOE
from moeserve.models.column_orders import column_orders
from moeserve.models.deepseek2.family import FAMILY as DEEPSEEK2
from moeserve.models.deepseek2.indexed import DEEPSEEK_FAMILY as DEEPSEEK32
from moeserve.models.deepseek2.indexed import GLM_FAMILY as GLM_DSA
from moeserve.models.deepseek2.mistral4 import FAMILY as MISTRAL4
from moeserve.models.deepseek4.family import FAMILY as DEEPSEEK4
from moeserve.models.dots1.family import FAMILY as DOTS1
from moeserve.models.draft_heads import refuse_draft_head, refuse_draft_head_folder
from moeserve.models.ernie45moe.dense import FAMILY as ERNIE45
from moeserve.models.ernie45moe.family import FAMILY as ERNIE45_MOE
from moeserve.models.errors import ModelError
from moeserve.models.exaone4.family import FAMILY as EXAONE4
from moeserve.models.exaonemoe.family import FAMILY as EXAONE_MOE
from moeserve.models.falconh1.family import FAMILY as FALCON_H1
from moeserve.models.gemma2dense.family import FAMILY as GEMMA2
from moeserve.models.gemma3dense.family import FAMILY as GEMMA3
from moeserve.models.gemma4moe.family import FAMILY as GEMMA4
from moeserve.models.glm4dense.family import FAMILY as GLM4
from moeserve.models.glm4moe.family import FAMILY as GLM4_MOE
from moeserve.models.glm5next.family import EARLIER_FAMILY as GLM5_NEXT_EARLIER
from moeserve.models.glm5next.family import FAMILY as GLM5_NEXT
from moeserve.models.gptoss.family import FAMILY as GPT_OSS
from moeserve.models.granitehybrid.family import FAMILY as GRANITE_HYBRID
from moeserve.models.granitemoe.dense import FAMILY as GRANITE
from moeserve.models.granitemoe.family import FAMILY as GRANITE_MOE
from moeserve.models.hunyuanmoe.dense import FAMILY as HUNYUAN
from moeserve.models.hunyuanmoe.family import FAMILY as HUNYUAN_MOE
from moeserve.models.hyv3.family import FAMILY as HY_V3
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.kimilinear.family import FAMILY as KIMI_LINEAR
from moeserve.models.kimilinear.k3 import FAMILY as KIMI_K3
from moeserve.models.laguna.family import FAMILY as LAGUNA
from moeserve.models.lfm2moe.dense import FAMILY as LFM2
from moeserve.models.lfm2moe.family import FAMILY as LFM2_MOE
from moeserve.models.llama4.family import FAMILY as LLAMA4
from moeserve.models.llamadense.family import FAMILY as LLAMA
from moeserve.models.mellum.family import FAMILY as MELLUM
from moeserve.models.mimo2.family import FAMILY as MIMO2
from moeserve.models.minimaxm2.family import FAMILY as MINIMAX_M2
from moeserve.models.minimaxm3.family import FAMILY as MINIMAX_M3
from moeserve.models.mistral3.family import FAMILY as MISTRAL3
from moeserve.models.museglimmer.family import FAMILY as MUSE_GLIMMER
from moeserve.models.nemotronh.family import DENSE_FAMILY as NEMOTRON_H
from moeserve.models.nemotronh.family import FAMILY as NEMOTRON_H_MOE
from moeserve.models.nemotronnas.family import FAMILY as DECI
from moeserve.models.olmo2.family import FAMILY as OLMO2
from moeserve.models.olmoe.family import FAMILY as OLMOE
from moeserve.models.phi3.family import FAMILY as PHI3
from moeserve.models.qwen2dense.family import FAMILY as QWEN2
from moeserve.models.qwen2dense.vision import FAMILY as QWEN2_VL
from moeserve.models.qwen2moe.family import FAMILY as QWEN2_MOE
from moeserve.models.qwen3dense.family import FAMILY as QWEN3
from moeserve.models.qwen3dense.vision import FAMILY as QWEN3_VL
from moeserve.models.qwen3moe.family import FAMILY as QWEN3_MOE
from moeserve.models.qwen3moe.vision import FAMILY as QWEN3_VL_MOE
from moeserve.models.qwen3next.family import FAMILY as QWEN3_NEXT
from moeserve.models.qwen4exp.family import FAMILY as QWEN4_EXP
from moeserve.models.qwen35dense.family import FAMILY as QWEN35
from moeserve.models.qwen35moe.family import FAMILY as QWEN35_MOE
from moeserve.models.seedoss.family import FAMILY as SEED_OSS
from moeserve.models.smollm3.family import FAMILY as SMOLLM3
from moeserve.models.sources.huggingface.mapping import HuggingFaceMapping, check_settings
from moeserve.models.sources.huggingface.wrapped_text import inner_model_type, text_config
from moeserve.models.sources.source import ModelSource
from moeserve.models.step35.family import FAMILY as STEP35
from moeserve.models.tensors import check_tensors

_families: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        QWEN3_MOE,
        QWEN2_MOE,
        QWEN3,
        GPT_OSS,
        GLM4_MOE,
        MINIMAX_M2,
        QWEN3_NEXT,
        QWEN35_MOE,
        DEEPSEEK2,
        GEMMA4,
        LLAMA,
        QWEN2,
        QWEN35,
        QWEN3_VL_MOE,
        HY_V3,
        DOTS1,
        OLMOE,
        ERNIE45_MOE,
        EXAONE_MOE,
        GRANITE_MOE,
        MISTRAL4,
        GLM_DSA,
        DEEPSEEK32,
        MIMO2,
        STEP35,
        HUNYUAN_MOE,
        LLAMA4,
        LAGUNA,
        AFMOE,
        MINIMAX_M3,
        KIMI_LINEAR,
        KIMI_K3,
        QWEN4_EXP,
        NEMOTRON_H_MOE,
        NEMOTRON_H,
        GRANITE_HYBRID,
        LFM2_MOE,
        DEEPSEEK4,
        COHERE2_MOE,
        GLM5_NEXT,
        GLM5_NEXT_EARLIER,
        BAILINGMOE3,
        BAILINGMOE2,
        QWEN3_VL,
        LFM2,
        GEMMA3,
        GRANITE,
        SMOLLM3,
        SEED_OSS,
        QWEN2_VL,
        COHERE2,
        HUNYUAN,
        ERNIE45,
        PHI3,
        MISTRAL3,
        OLMO2,
        EXAONE4,
        GLM4,
        GEMMA2,
        DECI,
        MUSE_GLIMMER,
        MELLUM,
        FALCON_H1,
    )
}
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(_families)  # by architecture


@contextmanager
def registered(family: ModelFamily) -> Iterator[ModelFamily]:
    """Supports one more family inside the context, for tests and experiments. Raises ValueError if its architecture
    exists already."""
    if family.architecture in _families:
        raise ValueError(f"architecture {family.architecture!r} is registered already")
    _families[family.architecture] = family
    try:
        yield family
    finally:
        del _families[family.architecture]


def read_shape(source: ModelSource) -> ModelShape:
    """Reads a model's shape from its metadata. Raises ModelError, also for an unsupported architecture."""
    family = FAMILIES.get(source.architecture)
    if family is None:
        refuse_draft_head(source.path, source.architecture)
        raise ModelError(
            source.path,
            f"architecture {source.architecture!r} is not supported; supported are {', '.join(FAMILIES)}",
        )
    orders = column_orders(source)
    shape = family.read_shape(source)
    return shape if orders is None else replace(shape, orders=orders)


def read_checked_shape(source: ModelSource) -> ModelShape:
    """Reads the shape and checks all tensors' shapes against it. Raises ModelError."""
    shape = read_shape(source)
    check_tensors(shape, source)
    return shape


def family_of_config(path: Path, config: Mapping[str, Any]) -> tuple[ModelFamily, dict[str, Any]]:
    """Returns the family of a Hugging Face config.json, and the part of it that configures the text model (possibly
    all). Raises ModelError for an unsupported model_type, quantisation or setting."""
    refuse_draft_head_folder(path, config)
    families = [
        (family, family.hugging_face) for family in FAMILIES.values() if family.hugging_face is not None
    ]
    readable = {model_type: each for each in families for model_type in each[1].model_types}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in readable:
        raise ModelError(
            path, f"model_type {model_type!r} is not supported; supported are {', '.join(readable)}"
        )
    wrapped = [each for each in families if model_type in each[1].wrappers]
    if not wrapped:
        family, mapping = readable[model_type]
        settings = dict(config)
    else:
        family, mapping = _family_of_text(path, config, wrapped)
        settings = text_config(config)
    check_settings(path, settings, mapping)
    return family, settings


def _family_of_text(
    path: Path, config: Mapping[str, Any], families: list[tuple[ModelFamily, HuggingFaceMapping]]
) -> tuple[ModelFamily, HuggingFaceMapping]:
    """Returns the family of a multimodal model's text model, out of those that this kind of model may contain. Raises
    ModelError."""
    inner = inner_model_type(config)
    if inner is None and len(families) == 1:
        return families[0]
    readable = {name: each for each in families for name in each[1].types_within}
    if inner not in readable:
        raise ModelError(
            path,
            f"model_type of 'text_config' is {inner!r}; in a {config['model_type']} {' and '.join(readable)} are "
            "supported",
        )
    return readable[inner]
