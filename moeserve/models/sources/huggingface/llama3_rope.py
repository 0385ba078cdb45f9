"""Llama 3's RoPE scaling: slow frequencies are divided, fast ones unchanged, the ones in between interpolated. A GGUF
stores the divisors as a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.quantization.table import F32

from .made_tensor import MadeTensor, bytes_of

_TYPE = "llama3"
# Project-specific metadata keys, absent from GGUFs, by config.json's names.
_SETTINGS = {
    "factor": "rope.llama3.factor",
    "low_freq_factor": "rope.llama3.low_freq_factor",
    "high_freq_factor": "rope.llama3.high_freq_factor",
    "original_max_position_embeddings": "rope.llama3.original_context_length",
}
ROTATED = "rope.llama3.dimension_count"  # dimensions of a head that rotate with factors; a missing key: all
_OTHERS = {"rope_type", "type", "rope_theta"}


def is_llama3(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json uses this scaling."""
    return _settings(config).get("rope_type", _settings(config).get("type")) == _TYPE


def llama3_rope(path: Path, config: Mapping[str, Any], theta: float) -> dict[str, MetadataValue]:
    """Returns the settings as metadata, by the keys of `_SETTINGS`. theta: used if config.json has no rope_theta.
    Raises ModelError for a missing or unsupported setting."""
    settings = _settings(config)
    unknown = sorted(settings.keys() - _SETTINGS.keys() - _OTHERS)
    if unknown:
        raise SettingError(path, f"{unknown[0]!r} of rope_type {_TYPE!r} is not supported")
    for name in _SETTINGS:
        value = settings.get(name)
        if not isinstance(value, int | float) or not 0 < value <= 1 << 24:
            raise SettingError(
                path, f"{name!r} of rope_type {_TYPE!r} is {value!r}; a number above 0 is expected"
            )
    if not settings["low_freq_factor"] <= settings["high_freq_factor"]:
        raise SettingError(path, "'low_freq_factor' is above 'high_freq_factor'")
    values: dict[str, MetadataValue] = {ours: float(settings[name]) for name, ours in _SETTINGS.items()}
    return values | {"rope.freq_base": settings.get("rope_theta", config.get("rope_theta")) or theta}


def rope_factors(metadata: Metadata) -> Iterator[tuple[str, MadeTensor]]:
    """Yields a GGUF tensor, float32 [rotary width / 2], of the factors by which RoPE's frequencies are divided (Llama
    3.1). Yields nothing if the metadata has no such settings."""
    architecture = metadata.require_str("general.architecture")
    if f"{architecture}.{_SETTINGS['factor']}" not in metadata:
        return
    factor, low, high, original = (
        metadata.require_float(f"{architecture}.{key}", 0.0, float(1 << 24)) for key in _SETTINGS.values()
    )
    if (stated := f"{architecture}.attention.key_length") in metadata:
        dim = metadata.require_int(stated, 2, 1024)
    else:
        hidden = metadata.require_int(f"{architecture}.embedding_length", 1, 1 << 16)
        dim = hidden // metadata.require_int(f"{architecture}.attention.head_count", 1, 1024)
    rotated = metadata.require_int(f"{architecture}.{ROTATED}", 2, dim, default=dim)
    theta = metadata.require_float(f"{architecture}.rope.freq_base", 2.0, 1e12)
    wavelengths = 2 * math.pi * theta ** (np.arange(rotated // 2) * 2 / rotated)
    # Llama 4's two factors are equal: no frequency is in between.
    mixed = (original / wavelengths - low) / ((high - low) or 1)
    between = 1 / ((1 - mixed) / factor + mixed)
    factors = np.where(
        wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between)
    )
    factors = np.pad(factors, (0, dim // 2 - rotated // 2), constant_values=1.0)
    yield n.ROPE_FREQS, MadeTensor(factors.shape, F32, (), lambda: bytes_of(factors.astype(np.float32)))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return (
        {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    )
