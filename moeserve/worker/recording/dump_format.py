"""The format of a debug dump: a folder with `dump.json` and a file `step-NNNNN.safetensors` per step.

docs/reference/debug-dumps.md describes each tensor. This module has the only list of them, in the order in which a
step produces them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FORMAT = 1
DESCRIPTION = "dump.json"
STEP_FILES = "step-*.safetensors"

CONTEXTS, PREVIOUS, TOKENS, POSITIONS, SLOTS = (
    "contexts",
    "previous_contexts",
    "token_ids",
    "positions",
    "request_slots",
)
EMBEDDING, AFTER_ATTENTION = "embedding", "after_attention"
IDS, WEIGHTS, ROUTER, OUTPUT = "expert_ids", "expert_weights", "router_logits", "expert_output"
LAYER_TENSORS = (AFTER_ATTENTION, "expert_input", ROUTER, IDS, WEIGHTS, OUTPUT)
SAMPLED_ROWS, LOGITS, SAMPLED = "sampled_rows", "logits", "sampled_tokens"

_ITEM_BYTES = {"F32": 4, "I32": 4, "I64": 8}
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True, slots=True)
class DumpShape:
    layers: int
    hidden: int
    experts: int
    top_k: int
    vocab: int
    dense_layers: tuple[int, ...] = ()  # layers without experts; they have no router tensors
    streams: int = 1  # residual streams, each of `hidden` numbers


class Form(NamedTuple):
    dtype: str  # name of the dtype in safetensors
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def of_layer(layer: int, tensor: str) -> str:
    return f"layers.{layer}.{tensor}"


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:05}.safetensors"


def step_tensors(model: DumpShape, rows: int, sampled: int) -> dict[str, Form]:
    """Returns the tensors of a step of `rows` rows, `sampled` of which get a next token."""
    m, residual = model, model.hidden * model.streams
    widths = {ROUTER: model.experts, IDS: model.top_k, WEIGHTS: model.top_k}
    forms = {CONTEXTS: Form("I64", (rows,)), PREVIOUS: Form("I64", (rows,))}
    forms |= {name: Form("I32", (rows,)) for name in (TOKENS, POSITIONS, SLOTS)}
    forms[EMBEDDING] = Form("F32", (rows, residual))
    for layer in range(m.layers):
        is_dense = layer in m.dense_layers
        for name in LAYER_TENSORS:
            if is_dense and name in widths:
                continue
            kind = "I32" if name == IDS else "F32"
            width = residual if name == AFTER_ATTENTION else widths.get(name, m.hidden)
            forms[of_layer(layer, name)] = Form(kind, (rows, width))
    forms[SAMPLED_ROWS] = Form("I32", (sampled,))
    forms[LOGITS] = Form("F32", (sampled, m.vocab))
    forms[SAMPLED] = Form("I32", (sampled,))
    return forms


def step_bytes(model: DumpShape, rows: int, sampled: int) -> int:
    return sum(form.nbytes for form in step_tensors(model, rows, sampled).values())


def context_hashes(tokens: npt.NDArray[np.int32], start: int) -> npt.NDArray[np.int64]:
    """Returns hashes that identify rows' contexts: for each prefix tokens[:start] ... tokens[:len(tokens)], the
    8-byte BLAKE2b hash of its int32 ids. The row at position p has the hash of tokens[:p + 1]."""
    hashed = hashlib.blake2b(tokens[:start].astype("<i4").tobytes(), digest_size=8)
    digests = [hashed.digest()]
    for token in tokens[start:].astype("<i4"):
        hashed.update(token.tobytes())
        digests.append(hashed.digest())
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def write_description(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes dump.json. about: origin of the dump, for readers of a comparison."""
    text = json.dumps({"format": FORMAT, **about}, indent=2) + "\n"
    with open(_private(folder / DESCRIPTION), "w", encoding="utf-8") as file:
        file.write(text)


class StepFile:
    """Writes a step's file tensor by tensor, so that only one is in memory. The file is renamed when complete. All
    calls may raise OSError."""

    def __init__(self, path: Path, forms: Mapping[str, Form], about: Mapping[str, str]) -> None:
        """forms: of all tensors, in order. about: the file's metadata."""
        self._path, self._forms = path, dict(forms)
        self._partial = path.with_name(path.name + ".partial")
        self._left = {name: form.nbytes for name, form in forms.items()}
        header: dict[str, Any] = {"__metadata__": dict(about)}
        at = 0
        for name, form in forms.items():
            header[name] = {
                "dtype": form.dtype,
                "shape": form.shape,
                "data_offsets": (at, at + form.nbytes),
            }
            at += form.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in forms}
        self._file = open(_private(self._partial), "wb", buffering=0)  # noqa: SIM115  closed by `close`
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, rows: npt.NDArray[Any], first: int = 0) -> None:
        """Writes rows [n, ..], any numeric dtype, of the tensor named `name`, from row `first` on, converted to the
        dump's dtype. Raises ValueError if they do not fit."""
        form = self._forms[name]
        if rows.shape[1:] != form.shape[1:] or first + len(rows) > form.shape[0]:
            raise ValueError(f"{name}: rows {first} on of shape {rows.shape} do not fit {form.shape}")
        array = np.ascontiguousarray(rows, _NUMPY[form.dtype])
        row_bytes = form.nbytes // max(1, form.shape[0])
        self._file.seek(self._starts[name] + first * row_bytes)
        left = array.reshape(-1).view(np.uint8).data
        while left:  # a write may be partial
            left = left[self._file.write(left) :]
        self._left[name] -= array.nbytes

    def close(self) -> None:
        """Completes the file. Raises ValueError if a tensor is incomplete."""
        self._file.close()
        missing = [name for name, left in self._left.items() if left]
        if missing:
            raise ValueError(f"not all of {', '.join(missing[:3])} was written")
        self._partial.rename(self._path)

    def abandon(self) -> None:
        """Deletes the unfinished file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


def _private(path: Path) -> int:
    """Creates a file readable only by its owner, because dumps reveal prompts."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
