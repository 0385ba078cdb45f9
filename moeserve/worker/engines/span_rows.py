"""Rows of embeddings that stand for tokens, by request slot: read when a request is bound, given to the step that
computes them, whichever chunks they are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.messages.spans import Span
from moeserve.processes.span_files import SpanFiles
from moeserve.worker.sequences import StepLayout

Rows = npt.NDArray[np.float32]


class StepSpan(NamedTuple):
    """Consecutive rows of a step."""

    first: int
    rows: Rows  # float32 [count, hidden]


class _Held(NamedTuple):
    start: int  # position
    rows: Rows


class SpanRows:
    """One writer: the runner."""

    def __init__(self, files: SpanFiles, hidden: int) -> None:
        self._files = files
        self._hidden = hidden
        self._held: dict[int, list[_Held]] = {}  # by request slot

    def bind(self, slot: int, spans: Sequence[Span]) -> None:
        """Overwrites what the slot held. Raises OSError, ValueError where a file is not what the plan says."""
        self._held.pop(slot, None)
        if spans:
            self._held[slot] = [_Held(span.start, self._read(span)) for span in spans]

    def _read(self, span: Span) -> Rows:
        rows = np.empty((span.count, self._hidden), np.float32)
        self._files.read(span.handle, rows.data.cast("B"))
        return rows

    def of_step(self, layout: StepLayout) -> list[StepSpan]:
        """The step's rows of embeddings. A span is let go with its last row."""
        if not self._held:
            return []
        found: list[StepSpan] = []
        for row, offset in zip(layout.rows, layout.offset.tolist(), strict=True):
            if row.req_slot in self._held:
                found += self._within(row.req_slot, row.start, row.start + row.count, offset - row.start)
        return found

    def _within(self, slot: int, start: int, stop: int, shift: int) -> Iterator[StepSpan]:
        for held in self._held[slot]:
            first, last = max(held.start, start), min(held.start + len(held.rows), stop)
            if first < last:
                yield StepSpan(first + shift, held.rows[first - held.start : last - held.start])
        left = [held for held in self._held[slot] if held.start + len(held.rows) > stop]
        if left:
            self._held[slot] = left
        else:
            del self._held[slot]
