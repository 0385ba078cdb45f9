"""Rules that make the tensors of a layer that a GGUF has in another form than checkpoints, one rule for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n

from .made_tensor import MadeTensor, find_tensor, floats_made, product_made, rows_made, unit_columns
from .safetensors_file import StoredTensor
from .tied_head import HEAD

Shape = tuple[int, ...]
Floats = npt.NDArray[np.float32]
Made = Callable[[Path, str, Metadata, dict[str, StoredTensor]], Iterator[tuple[str, MadeTensor]]]
MadeOutside = Callable[[Path, Metadata, dict[str, StoredTensor]], Iterator[tuple[str, MadeTensor]]]


@dataclass(frozen=True, slots=True)
class Remade:
    """A tensor that becomes one of float32 with the same number of values. ours, theirs: its name within a layer in a
    GGUF, and after "model.layers.N."; reshape: the new shape from the old one."""

    ours: str
    theirs: str
    reshape: Callable[[Shape], Shape]
    compute: Callable[[Floats], Floats] = lambda values: values


def convolution(ours: str, theirs: str) -> Remade:
    """Returns the rule for a depthwise convolution, stored as [channels, 1, taps] and read as [channels, taps]."""
    return Remade(ours, theirs, lambda shape: (shape[0], shape[-1]))


def delta_convolutions(under: str) -> list[Remade]:
    """Kimi Delta Attention's convolutions of q, k and v, read as [channels, 1, taps]. under: before their names."""
    return [
        Remade(n.of_part(part), f"{under}{name}_conv1d.weight", lambda shape: (shape[0], 1, shape[-1]))
        for part, name in zip(n.SSM_CONVS, "qkv", strict=True)
    ]


def decay_rate(ours: str, theirs: str, *dimensions: int) -> Remade:
    """Returns the rule for A_log, read as -exp(A_log). dimensions: the dimensions after the heads'."""
    return Remade(ours, theirs, lambda shape: (int(np.prod(shape)), *dimensions), lambda log: -np.exp(log))


def made_by(*rules: Remade) -> Made:
    """Returns a function for `HuggingFaceMapping.made`."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        del metadata
        for rule in rules:
            tensor: Any = stored.pop(prefix + rule.theirs, None)
            if tensor is None:
                continue  # a layer of another kind; what one lacks is found when the model is checked
            shape = rule.reshape(tensor.shape)
            if np.prod(shape) != np.prod(tensor.shape):
                raise ModelError(
                    path,
                    f"tensor {tensor.name!r} has shape {list(tensor.shape)}, which does not fit; download the whole "
                    "repository",
                )
            yield rule.ours, floats_made(tensor, shape, rule.compute)

    return made


def stored_as(names: Mapping[str, str]) -> Made:
    """Returns a function that yields matrices unchanged if a checkpoint has them under these names (GGUF's -> the
    checkpoint's) instead of the mapping's names."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        del path, metadata
        for ours, theirs in names.items():
            tensor = stored.pop(prefix + theirs, None)
            if tensor is not None:
                yield ours, rows_made(tensor, tensor.shape, lambda rows: rows)

    return made


def named_by_kind(theirs: str, mark: str, with_mark: str, without: str) -> Made:
    """Returns a function that yields a matrix under one of two GGUF names: one for layers that have the tensor `mark`
    (which must not be used yet), the other for layers without it."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        of_layer = stored_as({with_mark if prefix + mark in stored else without: theirs})
        yield from of_layer(path, prefix, metadata, stored)

    return made


def multiplied(rules: Mapping[str, tuple[str, str]]) -> Made:
    """Returns a function that yields the float32 product, number by number, of a norm's weight and of a matrix of one
    row. rules: GGUF's name -> the checkpoint's names of the two, after the prefix. The function removes both from
    `stored`, and raises ModelError if one is missing or they do not fit one another."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        del metadata
        for ours, theirs in rules.items():
            norm, row = (prefix + name for name in theirs)
            if norm not in stored and row not in stored:
                continue
            both = find_tensor(path, stored, norm, 1), find_tensor(path, stored, row, 2)
            if both[1].shape != (1, *both[0].shape):
                raise SettingError(path, f"tensors {norm!r} and {row!r} do not fit one another")
            del stored[norm], stored[row]
            yield ours, product_made(*both)

    return made


def head_of_unit_columns(flag: str, epsilon: float) -> MadeOutside:
    """Returns a function that yields the output matrix, each column divided by its length plus `epsilon`, if the
    metadata's boolean `flag` is true, else none. The function raises ModelError if the embedding is the output matrix:
    it must stay as it is."""

    def made_outside(
        path: Path, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        if not metadata.require_bool(flag, default=False):
            return
        if HEAD not in stored:
            setting = flag.rpartition(".")[2]
            raise SettingError(
                path, f"{setting!r} is True; with the embedding as the output matrix only False is supported"
            )
        yield n.OUTPUT, unit_columns(find_tensor(path, stored, HEAD, 2), epsilon)
        del stored[HEAD]

    return made_outside


def outside(made: Made) -> MadeOutside:
    """Returns a function for `HuggingFaceMapping.made_outside` that yields `made`'s tensors without a prefix."""
    return lambda path, metadata, stored: made(path, "", metadata, stored)


def together(*each: Made) -> Made:
    """Returns a function that yields the tensors of all the given functions."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        for one in each:
            yield from one(path, prefix, metadata, stored)

    return made
