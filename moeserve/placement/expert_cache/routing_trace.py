"""Routing traces: the experts to which each token of a text was routed, in every layer.

File format: a little-endian uint64 with the length of a JSON header, the header, and the expert ids:

    {"format": "moeserve-routing-trace", "version": 1, "source": "preset local, seed 0",
     "tokens": 4096, "layers": 48, "experts": 128, "experts_per_token": 8}
    uint16 [tokens, layers, experts_per_token], little-endian, to the end of the file

A token's ids in a layer are distinct; their order has no meaning. Files are untrusted and checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from moeserve.errors import ConfigError

MAX_HEADER_BYTES = 64 << 10
MAX_ID_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["moeserve-routing-trace"]
    version: Literal[1]
    source: Annotated[str, Meta(max_length=1024)]
    tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    layers: Annotated[int, Meta(ge=1, le=1024)]
    experts: Annotated[int, Meta(ge=1, le=4096)]  # per layer
    experts_per_token: Annotated[int, Meta(ge=1, le=4096)]


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    source: str  # origin of the trace, for people
    experts: int  # per layer
    ids: npt.NDArray[np.uint16]  # [tokens, layers, experts_per_token], below `experts`

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, experts per layer, experts per token)."""
        _, layers, top_k = self.ids.shape
        return layers, self.experts, top_k

    def used(self, *tokens: int) -> npt.NDArray[np.bool_]:
        """Returns bool [layers, experts]: the experts used by any of these tokens."""
        layers = self.ids.shape[1]
        used = np.zeros((layers, self.experts), np.bool_)
        used[np.arange(layers)[:, None], self.ids[list(tokens)]] = True
        return used


def read_trace(path: Path) -> RoutingTrace:
    """Reads and checks a trace file. Raises ConfigError, which names the file."""
    try:
        with open(path, "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes; {MAX_HEADER_BYTES} are allowed")
            header = msgspec.json.decode(file.read(length), type=_Header)
            shape = (header.tokens, header.layers, header.experts_per_token)
            expected = 2 * header.tokens * header.layers * header.experts_per_token
            if expected > MAX_ID_BYTES:
                raise ValueError(f"{expected} bytes of ids; {MAX_ID_BYTES} are allowed")
            data = file.read(expected + 1)
        if len(data) != expected:
            raise ValueError(
                f"the header says {expected} bytes of ids, the file has {len(data)} or more; record it again"
            )
        ids = np.frombuffer(data, "<u2").reshape(shape).astype(np.uint16)
        _check(ids, header.experts)
    except (OSError, ValueError, RecursionError, struct.error) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"routing trace {path}: {error}") from error
    return RoutingTrace(header.source, header.experts, ids)


def write_trace(path: Path, trace: RoutingTrace) -> None:
    """Writes a trace file. Raises OSError."""
    tokens, layers, top_k = trace.ids.shape
    header = msgspec.json.encode(
        _Header("moeserve-routing-trace", 1, trace.source, tokens, layers, trace.experts, top_k)
    )
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(header)) + header + trace.ids.astype("<u2").tobytes())


def _check(ids: npt.NDArray[np.uint16], experts: int) -> None:
    if int(ids.max()) >= experts:
        raise ValueError(f"expert {int(ids.max())} of {experts}")
    in_order = np.sort(ids, axis=2)
    if (in_order[:, :, 1:] == in_order[:, :, :-1]).any():
        raise ValueError("a token has the same expert twice in a layer")
