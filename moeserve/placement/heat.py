"""Expert heat: how often each expert was routed to. The server exports the file, and `--expert-heat` reads it.

    {"format": "moeserve-expert-heat", "version": 1, "model": "Qwen3-30B-A3B-Q4_K_M",
     "layers": 48, "experts": 128, "experts_per_token": 8, "counts": [[…128 tokens routed to each…], …48 layers]}

Files are untrusted and checked. Quantisations of one model share the same heat, so the model's name is only
informative; the numbers of layers and experts must match.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from moeserve.errors import ConfigError

MAX_BYTES = 64 << 20  # enough for 1,024 layers of 4,096 experts with counts of 14 digits
MAX_COUNT = 1 << 53  # largest integer that every JSON reader keeps exact

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class ExpertHeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(max_length=1024)]
    layers: Annotated[int, Meta(ge=1, le=1024)]
    experts: Annotated[int, Meta(ge=1, le=4096)]  # per layer
    experts_per_token: Annotated[int, Meta(ge=1, le=4096)]
    counts: list[list[Count]]  # [layers][experts]: tokens routed to each since the server's start
    format: Literal["moeserve-expert-heat"] = "moeserve-expert-heat"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if len(self.counts) != self.layers:
            raise ValueError(f"`counts` has {len(self.counts)} layers, `layers` says {self.layers}")
        for index, layer in enumerate(self.counts):
            if len(layer) != self.experts:
                raise ValueError(
                    f"`counts` has {len(layer)} experts in layer {index}, `experts` says {self.experts}; export the "
                    "file again"
                )


class _Written(msgspec.Struct):
    """The two fields that ExpertHeat has defaults for but a file must contain."""

    format: Literal["moeserve-expert-heat"]
    version: Literal[1]


def read_heat(path: Path, layers: int, experts: int) -> ExpertHeat:
    """Reads a heat file for a model with `layers` layers of `experts` experts. Raises ConfigError, which names the
    file."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"the file is larger than {MAX_BYTES >> 20} MiB")
        msgspec.json.decode(text, type=_Written)
        heat = msgspec.json.decode(text, type=ExpertHeat)
        if (heat.layers, heat.experts) != (layers, experts):
            raise ValueError(
                f"the file is for a model of {heat.layers} layers with {heat.experts} experts each ({heat.model}), "
                f"but this model has {layers} layers with {experts}; export the heat of this model"
            )
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"--expert-heat {path}: {error}") from error
    return heat


def write_heat(heat: ExpertHeat) -> bytes:
    """Returns the file's bytes: JSON with one line per layer, readable for people and `diff`."""
    head = msgspec.json.format(
        msgspec.json.encode(
            {
                name: getattr(heat, name)
                for name in ("format", "version", "model", "layers", "experts", "experts_per_token")
            }
        ),
        indent=2,
    )
    rows = b",\n    ".join(msgspec.json.encode(layer) for layer in heat.counts)
    return head.removesuffix(b"\n}") + b',\n  "counts": [\n    ' + rows + b"\n  ]\n}\n"
