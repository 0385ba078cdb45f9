"""LongRoPE (https://arxiv.org/abs/2402.13753): two lists of divisors of RoPE's frequencies, for contexts up to the
original one and for longer ones. A GGUF stores each list as a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.quantization.table import F32

from .config_json import rope_of
from .layer_settings import integer, number
from .made_tensor import MadeTensor, bytes_of
from .mapping import HuggingFaceMapping

_KINDS: Final = ("longrope", "su", "yarn")  # the last two in older folders
_ORIGINAL: Final = "original_max_position_embeddings"
ORIGINAL: Final = 4096  # tokens, transformers' default
# Keys of ours, absent from GGUFs, by config.json's names.
_LISTS: Final = {"short_factor": "rope.longrope.short_factors", "long_factor": "rope.longrope.long_factors"}
_OTHERS: Final = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "attention_factor",
    _ORIGINAL,
}


def longrope(path: Path, config: Mapping[str, Any], mapping: HuggingFaceMapping) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE of a family that stretches it in this way, or not. Raises
    ModelError."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise SettingError(path, f"{name} is {given!r:.80}, an object is expected")
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    plain = {"rope_theta": given.get("rope_theta", config.get("rope_theta")), "partial_rotary_factor": share}
    sizes = {size: config.get(size) for size in ("head_dim", "hidden_size", "num_attention_heads")}
    values = rope_of(path, {**sizes, "rope_parameters": plain}, mapping)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return values
    if kind not in _KINDS:
        raise SettingError(path, f"rope_type {kind!r:.40} is not supported; supported are default, longrope")
    unknown = sorted(given.keys() - _LISTS.keys() - _OTHERS)
    if unknown:
        raise SettingError(path, f"{unknown[0]!r} of rope_type {kind!r} is not supported")
    return values | _stretched(path, config, given)


def _stretched(path: Path, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the lists, the original context, and the factor of cos and sin, by default the paper's."""
    original = integer(
        path, {_ORIGINAL: given.get(_ORIGINAL) or config.get(_ORIGINAL)}, _ORIGINAL, ORIGINAL, low=2
    )
    most = integer(path, config, "max_position_embeddings")
    factor = number(path, given, "factor", 1e-3, 1e6, default=most / original)
    of_paper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists: dict[str, MetadataValue] = {}
    for theirs, ours in _LISTS.items():
        value = given.get(theirs)
        if not isinstance(value, list) or not all(isinstance(v, int | float) and 0 < v < 1e30 for v in value):
            raise SettingError(path, f"{theirs!r} is {value!r:.80}; a list of numbers above 0 is expected")
        lists[ours] = np.array(value, np.float32)
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": number(path, given, "attention_factor", 1e-3, 1e3, default=of_paper),
        **lists,
    }


def longrope_factors(metadata: Metadata) -> Iterator[tuple[str, MadeTensor]]:
    """Yields the lists of short and of long factors as GGUF tensors, float32 [rotary width / 2]. Yields nothing where
    RoPE is not stretched."""
    architecture = metadata.require_str("general.architecture")
    for ours, name in zip(_LISTS.values(), (n.SHORT_ROPE_FACTORS, n.LONG_ROPE_FACTORS), strict=True):
        factors = metadata.get(f"{architecture}.{ours}")
        if isinstance(factors, np.ndarray):
            yield name, MadeTensor(factors.shape, F32, (), partial(bytes_of, factors.astype(np.float32)))
