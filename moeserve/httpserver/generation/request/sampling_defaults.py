"""Sampling defaults of a server: the recommendations of the model's maker, and the operator's settings. Sources:
Hugging Face's `generation_config.json`; GGUF's `general.sampling.*`, which llama.cpp's converter writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.sampling.parameters import INT32_MAX, PARAMETERS, TYPES, Range

_MAX_NEW_TOKENS: Final = "max_new_tokens"  # only the operator can set it
_KINDS: Final = {**TYPES, _MAX_NEW_TOKENS: int}
_RANGES: Final = {
    **{name: parameter.range for name, parameter in PARAMETERS.items()},
    _MAX_NEW_TOKENS: Range(1, INT32_MAX),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    settings: Mapping[str, float] = field(default_factory=dict)  # of SamplerSettings
    max_tokens: int | None = None  # the longest answer where neither the request nor its API sets a bound


def sampling_defaults(config: ServerConfig, metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Returns the server's defaults. metadata: of the model's file. Raises ConfigError for a file or JSON that cannot
    be read, and values out of range."""
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
        if not isinstance(given, dict) or (unknown := given.keys() - _RANGES.keys()):
            names = ", ".join(_RANGES)
            wrong = f", not {', '.join(sorted(unknown))}" if isinstance(given, dict) else ""
            raise ConfigError(f"{flag}: must be a JSON object of {names}{wrong}")
        found |= _checked(given, flag)
    longest = found.pop(_MAX_NEW_TOKENS, None)
    return SamplingDefaults(found, None if longest is None else int(longest))


def _of_folder(model: Path) -> dict[str, Any]:
    path = model / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--generation-config auto: {path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"--generation-config auto: {path} is not a JSON object")
    if read.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: read[name] for name in PARAMETERS if read.get(name) is not None}


def _of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    keys = {name: f"general.sampling.{of.gguf}" for name, of in PARAMETERS.items() if of.gguf}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


def _checked(given: Mapping[str, Any], where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in given.items():
        kind, wanted = _KINDS[name], _RANGES[name]
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not (is_number and value in wanted):
            raise ConfigError(f"{where}: {name} must be in the range {wanted}, not {value!r}")
        parameter = PARAMETERS.get(name)
        found[name] = kind(value) if parameter is None else parameter.bounded(kind(value))
    return found
