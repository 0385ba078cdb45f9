"""Checks operators' arguments against the catalogue, before a kernel reads memory with them."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.operators.catalogue import OPERATORS


class _Form(NamedTuple):
    position: int
    name: str
    dtype: torch.dtype
    dims: tuple[str, ...]
    cpu: bool


@functools.cache
def _forms(operator: str) -> tuple[_Form, ...]:
    forms = []
    for i, (name, argument) in enumerate(OPERATORS[operator].arguments.items()):
        match = re.fullmatch(r"(\w+) \[(.*)\]", argument.form)
        if match:
            dims = tuple(match[2].split(", "))
            forms.append(_Form(i, name, getattr(torch, match[1]), dims, argument.cpu))
    return tuple(forms)


def check(operator: str, arguments: tuple[Any, ...]) -> None:
    """Raises ValueError for a tensor whose dtype, shape or device differs from the catalogue, or that is not
    contiguous."""
    sizes: dict[str, int] = {}
    device = next((a.device for a in arguments if isinstance(a, Tensor)), None)
    for form in _forms(operator):
        x: Tensor = arguments[form.position]
        wanted = torch.device("cpu") if form.cpu else device
        shape = tuple(x.shape)
        if (
            x.dtype != form.dtype
            or len(shape) != len(form.dims)
            or not x.is_contiguous()
            or x.device != wanted
        ):
            raise ValueError(
                f"{operator}: {form.name} is {x.dtype} {list(shape)}, strides {x.stride()}, on {x.device}; wanted: "
                f"{form.dtype} [{', '.join(form.dims)}], contiguous, on {wanted}"
            )
        for dim, size in zip(form.dims, shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise ValueError(f"{operator}: {form.name} is {list(shape)}, but {dim} is {sizes[dim]}")
