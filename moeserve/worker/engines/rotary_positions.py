"""RoPE positions of a step's rows, for models in which image tokens have three positions: time, height and width.

Text has one position, which after an image differs from its index in the sequence: an image of h x w tokens takes h
* w indices but only max(h, w) positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moeserve.messages.prompt_embeddings import SECTIONS, EmbeddingSpan
from moeserve.worker.sequences import Int32s, StepLayout


class _Picture(NamedTuple):
    start: int
    positions: Int32s  # [3, count]
    shift: int  # position minus index, for all tokens after it

    @property
    def end(self) -> int:
        return self.start + int(self.positions.shape[1])


class RotaryPositions:
    """The images of each request slot. Owned by the runner."""

    def __init__(self) -> None:
        self._pictures: dict[int, list[_Picture]] = {}  # request slot → images, in order

    def bind(self, slot: int, spans: Sequence[EmbeddingSpan]) -> None:
        """Initialises a request slot with its spans that have positions."""
        self._pictures.pop(slot, None)
        pictures = []
        for span in spans:
            if span.positions:
                positions = np.frombuffer(span.positions, np.int32).reshape(SECTIONS, -1)
                pictures.append(_Picture(span.start, positions, int(positions.max()) + 1 - span.end))
        if pictures:
            self._pictures[slot] = pictures

    def of_step(self, layout: StepLayout) -> Int32s:
        """Returns the rows' positions: int32 [n], or [3, n] if a row belongs to an image. It is layout.position if all
        rows have that."""
        return self.at(layout, layout.position)

    def at(self, layout: StepLayout, indices: Int32s) -> Int32s:
        """Returns the positions of other tokens of the rows' sequences: int32 [n], or [3, n], as `of_step` does.
        indices: int32 [n], of the tokens in their sequences."""
        return self._found(layout.req_slot, layout.offset, layout.count, indices)

    def of_tokens(self, slots: Int32s, indices: Int32s) -> Int32s:
        """Returns the positions of one token of each of these request slots: int32 [n], or [3, n], as `of_step` does.
        slots, indices: int32 [n]."""
        return self._found(
            slots, np.arange(len(slots), dtype=np.int32), np.ones(len(slots), np.int32), indices
        )

    def _found(self, slots: Int32s, offset: Int32s, count: Int32s, indices: Int32s) -> Int32s:
        """slots, offset, count: int32 [rows]: a row's request slot, and where its tokens are in `indices`."""
        if not self._pictures:
            return indices
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._pictures]
        if not rows:
            return indices
        found: Int32s = np.tile(indices, (SECTIONS, 1))
        has_picture = False
        for row in rows:
            part = slice(int(offset[row]), int(offset[row] + count[row]))
            columns, of_row = found[:, part], indices[part]
            pictures = self._pictures[int(slots[row])]
            if of_row[0] >= pictures[-1].end:  # as each row of an answer
                columns += pictures[-1].shift
                continue
            for picture in pictures:
                behind, inside = of_row >= picture.end, (of_row >= picture.start) & (of_row < picture.end)
                columns[:, behind] = of_row[behind] + picture.shift
                columns[:, inside] = picture.positions[:, of_row[inside] - picture.start]
                has_picture |= bool(inside.any())
        return found if has_picture else found[0]
