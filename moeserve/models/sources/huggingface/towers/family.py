"""The declarations of a kind of tower about its folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.made_tensor import MadeTensor
from moeserve.models.sources.huggingface.safetensors_file import StoredTensor

Config = Mapping[str, Any]  # config.json, or a part of it
Made = Iterator[tuple[str, MadeTensor]]


def nothing_made(name: str, tensor: StoredTensor, vision: Config) -> Made:
    """Returns no tensors: all tensors of the tower have the form of an mmproj file."""
    yield from ()


def nothing_derived(config: Config, vision: Config) -> dict[str, MetadataValue]:
    """Returns no settings: all settings of the tower are in `keys`."""
    return {}


@dataclass(frozen=True, slots=True)
class TowerFamily:
    name: str  # for messages
    model_types: tuple[str, ...]  # how vision_config's begins, or the model's where it has none
    projector: str
    keys: Mapping[str, tuple[str, ...]]  # clip.vision.KEY -> vision_config's names
    fixed: Mapping[str, Any]  # settings that the tower's code has no other value for, where they are given
    prefixes: tuple[str, ...]
    names: Mapping[str, str]  # tensor or module -> ours
    layer: re.Pattern[str]  # its number and the rest
    layer_names: Mapping[str, str]
    pixels: tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation without a processor's file
    # Yields what is made of a tensor that `names` does not have. Arguments: the name without a prefix, the tensor,
    # vision_config.
    made: Callable[[str, StoredTensor, Config], Made] = nothing_made
    # Returns further metadata from config.json and vision_config.
    derived: Callable[[Config, Config], dict[str, MetadataValue]] = nothing_derived
    whole_names: tuple[str, ...] = ()  # those of `prefixes` that `names` has
    skipped: frozenset[str] = field(
        default_factory=frozenset
    )  # tensors of vision_config's model that are not read
