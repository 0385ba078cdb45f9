"""The supported architectures; the only list of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from moeserve.models.column_orders import column_orders
from moeserve.models.draft_heads import refuse_draft_head, refuse_draft_head_folder
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.sources.huggingface.mapping import HuggingFaceMapping, check_settings
from moeserve.models.sources.huggingface.wrapped_text import inner_model_type, text_config
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import check_tensors

# By architecture, as GGUF files name it: the family's module below `moeserve.models`, and after a colon its name there
# if that is not FAMILY.
_PLACES: Final[Mapping[str, str]] = {
    "qwen3moe": "qwen3moe.family",
    "qwen2moe": "qwen2moe.family",
    "qwen3": "qwen3dense.family",
    "gpt-oss": "gptoss.family",
    "glm4moe": "glm4moe.family",
    "minimax-m2": "minimaxm2.family",
    "qwen3next": "qwen3next.family",
    "qwen35moe": "qwen35moe.family",
    "deepseek2": "deepseek2.family",
    "gemma4": "gemma4moe.family",
    "llama": "llamadense.family",
    "qwen2": "qwen2dense.family",
    "qwen35": "qwen35dense.family",
    "qwen3vlmoe": "qwen3moe.vision",
    "hy_v3": "hyv3.family",
    "dots1": "dots1.family",
    "olmoe": "olmoe.family",
    "ernie4_5-moe": "ernie45moe.family",
    "exaone-moe": "exaonemoe.family",
    "granitemoe": "granitemoe.family",
    "mistral4": "deepseek2.mistral4",
    "glm-dsa": "deepseek2.indexed:GLM_FAMILY",
    "deepseek32": "deepseek2.indexed:DEEPSEEK_FAMILY",
    "mimo2": "mimo2.family",
    "step35": "step35.family",
    "hunyuan-moe": "hunyuanmoe.family",
    "llama4": "llama4.family",
    "laguna": "laguna.family",
    "afmoe": "afmoe.family",
    "minimax-m3": "minimaxm3.family",
    "kimi-linear": "kimilinear.family",
    "kimi-k3": "kimilinear.k3",
    "qwen4exp": "qwen4exp.family",
    "nemotron_h_moe": "nemotronh.family",
    "nemotron_h": "nemotronh.family:DENSE_FAMILY",
    "granitehybrid": "granitehybrid.family",
    "lfm2moe": "lfm2moe.family",
    "deepseek4": "deepseek4.family",
    "deepseek": "deepseekmoe.family",
    "cohere2moe": "cohere2moe.family",
    "glm5-next": "glm5next.family",
    "glm5next": "glm5next.family:EARLIER_FAMILY",
    "bailingmoe3": "bailingmoe3.family",
    "bailingmoe2": "bailingmoe2.family",
    "bailingmoe": "bailingmoe.family",  # behind bailingmoe2: of two that a config.json may mean, the later one
    "qwen3vl": "qwen3dense.vision",
    "lfm2": "lfm2moe.dense",
    "gemma3": "gemma3dense.family",
    "granite": "granitemoe.dense",
    "granite_swa": "granitemoe.windowed",
    "smollm3": "smollm3.family",
    "seed_oss": "seedoss.family",
    "qwen2vl": "qwen2dense.vision",
    "cohere2": "cohere2moe.dense",
    "hunyuan-dense": "hunyuanmoe.dense",
    "ernie4_5": "ernie45moe.dense",
    "phi3": "phi3.family",
    "mistral3": "mistral3.family",
    "olmo2": "olmo2.family",
    "exaone4": "exaone4.family",
    "glm4": "glm4dense.family",
    "gemma2": "gemma2dense.family",
    "deci": "nemotronnas.family",
    "muse-glimmer": "museglimmer.family",
    "mellum": "mellum.family",
    "falcon-h1": "falconh1.family",
}


class _Families(Mapping[str, ModelFamily]):
    """Imports a family when it is asked for: a GGUF model's alone. For a folder in Hugging Face's layout all are
    imported, which takes 0.02 to 0.05 s of CPU in each process that opens it."""

    def __init__(self) -> None:
        self.imported: dict[str, ModelFamily] = {}

    def __getitem__(self, architecture: str) -> ModelFamily:
        if architecture not in self.imported:
            module, _, name = _PLACES[architecture].partition(":")
            family = getattr(import_module(f"moeserve.models.{module}"), name or "FAMILY")
            self.imported[architecture] = family
        return self.imported[architecture]

    def __contains__(self, architecture: object) -> bool:
        return architecture in self.imported or architecture in _PLACES

    def __iter__(self) -> Iterator[str]:
        return iter({**_PLACES, **self.imported})

    def __len__(self) -> int:
        return len({**_PLACES, **self.imported})


_families: Final = _Families()
# What a GGUF file is that belongs to a model, by `general.type`, and how it is served.
_PARTS: Final = {
    "mmproj": "a vision tower without its model: serve the model, and name this file with --mmproj",
    "adapter": "a LoRA adapter without its model: serve the model, and name this file with --lora-modules NAME=FILE",
    "imatrix": "an importance matrix, with which models are quantised: serve a model",
}
_INSTEAD: Final = "choose a model of one of these, or a newer moeserve"
FAMILIES: Final[Mapping[str, ModelFamily]] = _families  # by architecture


@contextmanager
def registered(family: ModelFamily) -> Iterator[ModelFamily]:
    """Returns a context in which one more family is supported, for tests and experiments. Raises ValueError if its
    architecture exists already."""
    if family.architecture in FAMILIES:
        raise ValueError(f"architecture {family.architecture!r} is registered already")
    _families.imported[family.architecture] = family
    try:
        yield family
    finally:
        del _families.imported[family.architecture]


def read_shape(source: ModelSource) -> ModelShape:
    """Reads a model's shape from its metadata. Raises ModelError, also for an unsupported architecture."""
    _refuse_part(source)
    family = FAMILIES.get(source.architecture)
    if family is None:
        refuse_draft_head(source.path, source.architecture)
        raise ModelError(
            source.path,
            f"architecture {source.architecture!r} is not supported; supported are {', '.join(FAMILIES)}; {_INSTEAD}",
        )
    orders = column_orders(source)
    shape = family.read_shape(source)
    return shape if orders is None else replace(shape, orders=orders)


def _refuse_part(source: ModelSource) -> None:
    """Raises ModelError for a GGUF file that belongs to a model but is none."""
    kind = source.metadata.get("general.type")  # first, as an importance matrix has no architecture
    if not (isinstance(kind, str) and kind in _PARTS):
        kind = "mmproj" if source.architecture == "clip" else None
    if kind is not None:
        raise ModelError(source.path, f"this is {_PARTS[kind]}")


def read_checked_shape(source: ModelSource) -> ModelShape:
    """Reads the shape and checks all tensors' shapes against it. Raises ModelError for a missing or unsupported
    setting."""
    shape = read_shape(source)
    check_tensors(shape, source)
    return shape


def family_of_config(path: Path, config: Mapping[str, Any]) -> tuple[ModelFamily, dict[str, Any]]:
    """Returns the family of a Hugging Face config.json, and the part of it that configures the text model (possibly
    all). Raises ModelError for an unsupported model_type, quantisation or setting."""
    refuse_draft_head_folder(path, config)
    families = [
        (family, family.hugging_face)
        for family in FAMILIES.values()
        if family.hugging_face is not None and family.hugging_face.may_be_meant(config)
    ]
    readable = {model_type: each for each in families for model_type in each[1].model_types}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in readable:
        raise ModelError(
            path,
            f"model_type {model_type!r} is not supported; supported are {', '.join(readable)}; {_INSTEAD}",
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
            f"supported; {_INSTEAD}",
        )
    return readable[inner]
