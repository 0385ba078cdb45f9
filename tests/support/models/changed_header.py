"""A GGUF file with another number in its header."""

from __future__ import annotations

import struct
from pathlib import Path

UINT32 = 4  # GGUF's number of the type


def with_number(model: Path, to: Path, key: str, value: int) -> Path:
    """A copy whose header has this number under `<architecture>.<key>`."""
    data = bytearray(model.read_bytes())
    at = data.index(f".{key}".encode()) + len(key) + 1
    (kind,) = struct.unpack_from("<I", data, at)
    assert kind == UINT32
    struct.pack_into("<I", data, at + 4, value)
    to.write_bytes(data)
    return to
