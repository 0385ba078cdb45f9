"""Reads a dump from disk, one tensor at a time. Files of the same form that another program wrote can be read too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from moeserve.errors import UserError
from moeserve.worker.recording.dump_format import (
    CONTEXTS,
    DESCRIPTION,
    FORMAT,
    LAYER_TENSORS,
    LOGITS,
    POSITIONS,
    PREVIOUS,
    SAMPLED,
    SAMPLED_ROWS,
    SLOTS,
    STEP_FILES,
    TOKENS,
)

_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")
_SAMPLED = (SAMPLED_ROWS, LOGITS, SAMPLED)  # tensors with one row per sampled row of the step


class DumpError(UserError):
    """A dump cannot be read, or two dumps have nothing in common to compare."""


class StepReader:
    """The memory-mapped file of one step."""

    def __init__(self, path: Path) -> None:
        """Opens the file of a step. Raises DumpError if it is damaged."""
        self.path = path
        try:
            self._file = safe_open(path, framework="numpy")
            self.shapes = {
                name: tuple(self._file.get_slice(name).get_shape())
                for name in self._file.keys()  # noqa: SIM118
            }
            self.requests: Mapping[str, str] = json.loads((self._file.metadata() or {}).get("requests", "{}"))
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise DumpError(f"{path}: cannot be read: {error}") from error
        missing = [name for name in (CONTEXTS, TOKENS, POSITIONS) if name not in self.shapes]
        if missing:
            raise DumpError(
                f"{path}: has no {missing[0]}, by which rows are matched; name folders that --debug-dump "
                "wrote"
            )
        rows, sampled = self.shapes[CONTEXTS][0], self.shapes.get(SAMPLED_ROWS, (0,))[0]
        for name, shape in self.shapes.items():
            expected = sampled if name in _SAMPLED else rows
            if shape[:1] != (expected,):
                raise DumpError(f"{path}: {name} is of shape {shape}; {expected} rows are expected")

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str) -> npt.NDArray[Any]:
        """Returns a whole tensor, with the shape and dtype that the dump has. Raises DumpError if the file is
        damaged."""
        return self._checked(name, lambda: self._file.get_tensor(name))

    def read_row(self, name: str, row: int) -> npt.NDArray[Any]:
        """Returns one row of a tensor: [1, ...]. Raises DumpError if the file is damaged."""
        return self._checked(name, lambda: self._file.get_slice(name)[row : row + 1])

    def _checked(self, name: str, read: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        try:
            return read()
        except (SafetensorError, TypeError) as error:
            raise DumpError(f"{self.path}: {name} cannot be read: {error}; write it as F32 or F16") from error


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a dump, in the order of its steps: an int64 array [rows] for each property of a row."""

    step: npt.NDArray[np.int64]  # the row's step: an index in Dump.steps
    row: npt.NDArray[np.int64]  # its row number in that step
    context: npt.NDArray[np.int64]
    previous: npt.NDArray[np.int64]  # the context of the position before; 0 if the dump does not have it
    token: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]  # request slot; -1 if the dump does not have it
    sampled: npt.NDArray[np.int64]  # index among the step's sampled rows; -1: the row was not sampled


class Dump:
    def __init__(self, folder: Path) -> None:
        """Opens a dump's folder. Raises DumpError if it holds no steps or is damaged."""
        self.folder = folder
        self.about = _read_description(folder)
        paths = sorted(folder.glob(STEP_FILES))
        if not paths:
            raise DumpError(f"{folder}: holds no {STEP_FILES}; name a folder that --debug-dump wrote")
        self.steps = [StepReader(path) for path in paths]
        self.rows = Rows(
            np.concatenate([np.full(s.shapes[CONTEXTS][0], i) for i, s in enumerate(self.steps)]),
            np.concatenate([np.arange(s.shapes[CONTEXTS][0]) for s in self.steps]),
            context=self._column(CONTEXTS),
            previous=self._column(PREVIOUS, absent=0),
            token=self._column(TOKENS),
            position=self._column(POSITIONS),
            slot=self._column(SLOTS, absent=-1),
            sampled=np.concatenate([_sampled_places(step) for step in self.steps]),
        )

    @property
    def tensors(self) -> set[str]:
        """Returns the names of the tensors that every step has."""
        return set.intersection(*(set(step.shapes) for step in self.steps))

    def width(self, tensor: str) -> int:
        """Returns the width of the tensor's rows in the first step."""
        return int(np.prod(self.steps[0].shapes[tensor][1:], dtype=np.int64))

    @property
    def num_layers(self) -> int:
        found = (_LAYER.fullmatch(name) for name in self.steps[0].shapes)
        return 1 + max((int(m[1]) for m in found if m and m[2] in LAYER_TENSORS), default=-1)

    def rows_of(self, tensor: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns rows [len(rows), width] of a tensor that has one row per row of a step. rows: indices in `self.rows`.
        Raises DumpError if a file of the dump is damaged."""
        steps = self.rows.step[rows]
        parts = {s: self.steps[s].read(tensor).reshape(-1, self.width(tensor)) for s in np.unique(steps)}
        first = next(iter(parts.values()))
        found = np.empty((len(rows), first.shape[1]), first.dtype)
        for step, part in parts.items():
            here = steps == step
            found[here] = part[self.rows.row[rows[here]]]
        return found

    def sampled_rows_of(self, tensor: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns the sampled rows [len(rows), ...] of a tensor that has one row per sampled row; reads no others.
        Raises DumpError if a file of the dump is damaged."""
        places = zip(self.rows.step[rows].tolist(), self.rows.sampled[rows].tolist(), strict=True)
        return np.concatenate([self.steps[step].read_row(tensor, at) for step, at in places])

    def _column(self, name: str, absent: int = 0) -> npt.NDArray[np.int64]:
        parts = [
            step.read(name) if name in step else np.full(step.shapes[CONTEXTS][0], absent)
            for step in self.steps
        ]
        return np.concatenate(parts).astype(np.int64)


def _sampled_places(step: StepReader) -> npt.NDArray[np.int64]:
    places = np.full(step.shapes[CONTEXTS][0], -1)
    if SAMPLED_ROWS in step:
        sampled = step.read(SAMPLED_ROWS)
        if len(sampled) and not 0 <= sampled.min() <= sampled.max() < len(places):
            raise DumpError(f"{step.path}: {SAMPLED_ROWS} names rows that the step does not have")
        places[sampled] = np.arange(len(sampled))
    return places


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DumpError(f"{folder}: holds no {DESCRIPTION}; is it a dump?") from error
    except (OSError, ValueError) as error:
        raise DumpError(f"{path}: cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise DumpError(f"{path}: has format {found!r}; this version reads {FORMAT}")
    return about
