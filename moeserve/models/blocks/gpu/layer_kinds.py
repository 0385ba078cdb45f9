"""Finds layers that launch the same kernels, so that compiling one layer's kernels serves the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor


def distinct_layers(of_layers: Sequence[object]) -> list[int]:
    """Returns a subset of the layers (ascending) whose launches cover the kernels of all layers, so that only these
    need a warm-up. A layer's first kernel also adds the previous layer's output, so two layers are the same only if the
    layers before them are too. of_layers: for each layer, everything on which its launches depend."""
    kinds = [kind_of(layer) for layer in of_layers]
    first: dict[object, int] = {}
    for index, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        first.setdefault(pair, index)
    return sorted(first.values())


def kind_of(value: object) -> object:
    """Returns a value that is equal for arguments for which a launch compiles the same kernel. Tensors count by
    dtype, shape, strides and 16-byte alignment. An object of unknown type equals only itself."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15
    if isinstance(value, list | tuple):
        return type(value), tuple(map(kind_of, value))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), tuple(kind_of(getattr(value, field.name)) for field in fields)
    if value is None or isinstance(value, int | float | str):
        return value
    return type(value), id(value)
