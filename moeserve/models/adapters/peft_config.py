"""Reads adapter_config.json, as PEFT writes it: https://huggingface.co/docs/peft/package_reference/lora."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moeserve.models.adapters.errors import OTHER, AdapterError
from moeserve.models.errors import ModelError
from moeserve.models.sources.json_files import read_json

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 1024
MAX_PATTERNS = 4096
MAX_BYTES = 4 << 20  # patterns for MAX_PATTERNS modules take 0.5 MB

Value = TypeVar("Value", int, float)

# Settings that make the model compute something other than W x + B A x, with their harmless values.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "velora_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Initialisations of A and B that leave the model's weights unchanged, so that the adapter is the whole change.
_PLAIN_BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica")
# Settings that do not change the computation although they are named like PEFT's variants (`use_*`, `*_config`).
_HARMLESS = frozenset(
    {
        "use_rslora",
        "megatron_config",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
    }
)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    is_rank_stabilised: bool  # rsLoRA (arXiv:2312.03732): scale alpha / sqrt(rank) instead of alpha / rank
    rank_pattern: Mapping[str, int]  # regular expression for the end of a module's name → rank
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...] = ()  # ends of parameters' names

    def key_of(self, module: str) -> str:
        """Returns the name against which patterns are matched: the module's name, or the name of the module's weight if
        `target_parameters` selected it."""
        weight = f"{module}.weight"
        return weight if any(f".{weight}".endswith(f".{name}") for name in self.target_parameters) else module

    def rank_of(self, key: str) -> int:
        return _matching(self.rank_pattern, key, self.rank)

    def scale_of(self, key: str) -> float:
        rank = self.rank_of(key)
        alpha = _matching(self.alpha_pattern, key, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads and returns the adapter's configuration (CONFIG_FILE) in the folder. Raises AdapterError if it is invalid
    or has an unsupported setting, which the error names."""
    path = folder / CONFIG_FILE
    try:
        found = read_json(path, MAX_BYTES)
    except ModelError as error:
        raise AdapterError(path, str(error).removeprefix(f"{path}: ")) from error
    kind = found.get("peft_type")
    if kind != "LORA":
        raise AdapterError(path, f"'peft_type' is {kind!r}; only LORA is supported")
    for name, harmless in _UNSUPPORTED.items():
        if name in found and found[name] not in harmless:
            raise AdapterError(
                path, f"{name!r} is {found[name]!r}: this is not supported; leave it out in training"
            )
    _check_beginning(path, found.get("init_lora_weights"))
    for name in found.keys() - _UNSUPPORTED.keys() - _HARMLESS:
        is_variant = name.startswith("use_") or name.endswith("_config")  # naming conventions of PEFT
        if is_variant and found[name]:
            raise AdapterError(path, f"{name!r} is {found[name]!r}: this is not supported; {OTHER}")
    return PeftConfig(
        rank=_rank(path, "r", found.get("r")),
        alpha=_number(path, "lora_alpha", found.get("lora_alpha")),
        is_rank_stabilised=_flag(path, "use_rslora", found.get("use_rslora")),
        rank_pattern={
            key: _rank(path, f"rank_pattern[{key}]", value)
            for key, value in _patterns(path, found, "rank_pattern")
        },
        alpha_pattern={
            key: _number(path, f"alpha_pattern[{key}]", value)
            for key, value in _patterns(path, found, "alpha_pattern")
        },
        target_parameters=_target_parameters(path, found.get("target_parameters")),
    )


def _flag(path: Path, name: str, value: object) -> bool:
    if not (value is None or isinstance(value, bool)):
        raise AdapterError(path, f"{name!r} is {value!r}; true or false is expected")
    return value is True


def _check_beginning(path: Path, value: object) -> None:
    known = value.lower() if isinstance(value, str) else value
    if not (known is None or isinstance(known, bool) or known in _PLAIN_BEGINNINGS):
        raise AdapterError(
            path,
            f"'init_lora_weights' is {value!r}, which changes the model's own weights: this is not supported; save the "
            "adapter with path_initial_model_for_weight_conversion, which makes a plain one of it",
        )


def _target_parameters(path: Path, value: object) -> tuple[str, ...]:
    names = value or []
    if not isinstance(names, list) or len(names) > MAX_PATTERNS or not all(isinstance(n, str) for n in names):
        raise AdapterError(
            path, f"'target_parameters' is not a list of at most {MAX_PATTERNS} names; {OTHER}"
        )
    return tuple(names)


def _patterns(path: Path, found: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    patterns = found.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterError(path, f"{name!r} is not an object of at most {MAX_PATTERNS} entries; {OTHER}")
    for key in patterns:
        # PEFT accepts any regular expression, but writes only names, perhaps after ".*". Others are refused, as an
        # expression from an untrusted file may run forever.
        if not re.fullmatch(r"\^?(\.\*)?[\w.\\]*\$?", key):
            raise AdapterError(path, f"{name!r} has {key!r}; only the names of modules are supported")
    return list(patterns.items())


def _matching(patterns: Mapping[str, Value], key: str, otherwise: Value) -> Value:
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if name.startswith(".*") and key.endswith(name.removeprefix(".*")):
            return value
        if key == name or (key.endswith("." + name) and not pattern.startswith("^")):
            return value
    return otherwise


def _rank(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise AdapterError(
            path, f"{name!r} is {value!r}; a whole number from 1 to {MAX_RANK} is expected; {OTHER}"
        )
    return value


def _number(path: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(path, f"{name!r} is {value!r}; a number is expected")
    return float(value)
