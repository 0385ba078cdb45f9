"""Gives the memory that this process freed back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Gives back freed blocks of less than 32 MiB, which the C library would keep: a loaded tower's float32 weights,
    and a picture's numbers. Does nothing with a C library that has no `malloc_trim` (musl, macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
