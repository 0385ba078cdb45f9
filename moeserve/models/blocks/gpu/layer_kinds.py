"""Which layers launch the same kernels, so that those of one of them stand for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor


def distinct_layers(of_layers: Sequence[object]) -> list[int]:
    """The layers to launch, ascending, for all kernels that all of them launch. of_layers: what each one's launches
    depend on. The first kernel of a layer adds what the one before has left, so pairs of neighbours count."""
    kinds = [kind_of(layer) for layer in of_layers]
    first: dict[object, int] = {}
    for index, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        first.setdefault(pair, index)
    return sorted(first.values())


def kind_of(value: object) -> object:
    """Equal for values with which a launch needs the same kernel: of a tensor its type, sizes and alignment count. What
    is not known here is like nothing else."""
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
