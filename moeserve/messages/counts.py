"""Structs of counts that can be added field by field."""

from __future__ import annotations

from operator import add, sub
from typing import Self

import msgspec
from msgspec.structs import astuple


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Base of structs whose fields are numbers that only grow."""

    def plus(self, other: Self) -> Self:
        return type(self)(*map(add, astuple(self), astuple(other)))

    def since(self, before: Self) -> Self:
        return type(self)(*map(sub, astuple(self), astuple(before)))
