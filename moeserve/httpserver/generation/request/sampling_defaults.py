"""Sampling defaults of a server: those that the model's maker recommends, and the operator's.

Sources: Hugging Face's `generation_config.json`; GGUF's `general.sampling.*`, which llama.cpp's converter writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

# Field of GenerationSpec: its type and its range.
_RANGES: Final[Mapping[str, tuple[type[int] | type[float], float, float]]] = {
    "temperature": (float, 0.0, 2.0),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, 0, (1 << 31) - 1),
    "min_p": (float, 0.0, 1.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.01, 100.0),
}
# Of the operator alone: the longest answer where neither the request nor its API sets a bound.
_MAX_NEW_TOKENS: Final = "max_new_tokens"
_OVERRIDES: Final = {**_RANGES, _MAX_NEW_TOKENS: (int, 1, (1 << 31) - 1)}
_IN_GGUF: Final = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def sampling_defaults(config: ServerConfig, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Returns fields of GenerationSpec; `metadata` is the model file's. Raises ConfigError."""
    found: dict[str, float] = {}
    if config.generation_config == "auto":
        recommended = _of_folder(Path(config.model)) or _of_gguf(metadata)
        found = _checked(recommended, "the model's sampling parameters (--generation-config auto)")
    if config.override_generation_config is not None:
        flag = "--override-generation-config"
        try:
            given = json.loads(config.override_generation_config)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{flag}: is not valid JSON: {error}") from error
        if not isinstance(given, dict) or (unknown := given.keys() - _OVERRIDES.keys()):
            names = ", ".join(_OVERRIDES)
            wrong = f", not {', '.join(sorted(unknown))}" if isinstance(given, dict) else ""
            raise ConfigError(f"{flag}: must be a JSON object of {names}{wrong}")
        found |= _checked(given, flag)
    if _MAX_NEW_TOKENS in found:
        found["default_max_tokens"] = found.pop(_MAX_NEW_TOKENS)
    return found


def _of_folder(model: Path) -> dict[str, Any]:
    path = model / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--generation-config auto: {path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"--generation-config auto: {path} is no JSON object")
    if read.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: read[name] for name in _RANGES if read.get(name) is not None}


def _of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    keys = {name: f"general.sampling.{key}" for name, key in _IN_GGUF.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


def _checked(given: Mapping[str, Any], where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in given.items():
        kind, low, high = _OVERRIDES[name]
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not (is_number and low <= value <= high):
            raise ConfigError(f"{where}: {name} must be in the range {low:g} to {high:g}, not {value!r}")
        found[name] = kind(value)
    return found
