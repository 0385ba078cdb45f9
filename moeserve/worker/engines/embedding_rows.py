"""Rows whose input is embeddings instead of tokens. A step reads only the rows that it computes, even if a chunk ends
within a span, so at most one step's rows are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.sequences import Int32s, StepLayout

Rows = npt.NDArray[np.float32]


class StepSpan(NamedTuple):
    """Consecutive rows of a step with embeddings."""

    first: int
    rows: Rows  # float32 [count, width]
    left: int  # positions of the span that a later step computes


class EmbeddingRows:
    """The embedding spans of each request slot. Owned by the runner."""

    def __init__(self, files: EmbeddingFiles, width: int) -> None:
        """width: `ModelShape.embedding_size`."""
        self._files = files
        self._width = width
        self._left: dict[int, list[EmbeddingSpan]] = {}  # request slot → spans that are not fully computed

    def bind(self, slot: int, spans: Sequence[EmbeddingSpan]) -> None:
        """Initialises a request slot."""
        self._left.pop(slot, None)
        if spans:
            self._left[slot] = list(spans)

    def of_step(self, layout: StepLayout) -> list[StepSpan]:
        """Returns the step's embeddings. Raises OSError and ValueError if a file differs from the plan."""
        if not self._left:
            return []
        found: list[StepSpan] = []
        for row, offset in zip(layout.rows, layout.offset.tolist(), strict=True):
            if row.req_slot in self._left:
                found += self._within(row.req_slot, row.start, row.start + row.count, offset - row.start)
        return found

    def _within(self, slot: int, start: int, stop: int, shift: int) -> Iterator[StepSpan]:
        for span in self._left[slot]:
            first, last = max(span.start, start), min(span.end, stop)
            if first < last:
                rows = self._read(span, first - span.start, last - first)
                yield StepSpan(first + shift, rows, span.end - last)
        left = [span for span in self._left[slot] if span.end > stop]
        if left:
            self._left[slot] = left
        else:
            del self._left[slot]

    @staticmethod
    def ends(found: Sequence[StepSpan], positions: Int32s) -> Int32s | None:
        """Returns the number of positions that each row sees if the rows of a span see all of the span: int32 [n]; None
        if the step has no span. found: the step's spans. positions: of the step's rows. Raises ValueError if the step
        ends within a span."""
        if not found:
            return None
        ends: Int32s = positions + np.int32(1)
        for first, rows, left in found:
            if left:
                raise ValueError(
                    f"a step ends {left} positions before the end of a span that is computed whole, as a picture is; "
                    "the planner must not divide it"
                )
            ends[first : first + len(rows)] = ends[first + len(rows) - 1]
        return ends

    def _read(self, span: EmbeddingSpan, first: int, count: int) -> Rows:
        rows = np.empty((count, self._width), np.float32)
        row_bytes = rows.itemsize * self._width
        self._files.read(span.handle, rows.data.cast("B"), first * row_bytes, span.count * row_bytes)
        return rows
