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
        """Returns the rows' positions: int32 [n], or [3, n] if a row belongs to an image."""
        if not self._pictures:
            return layout.position
        rows = [row for row, slot in enumerate(layout.req_slot.tolist()) if slot in self._pictures]
        if not rows:
            return layout.position
        found: Int32s = np.tile(layout.position, (SECTIONS, 1))
        has_picture = False
        for row in rows:
            first, start, count = int(layout.offset[row]), int(layout.start[row]), int(layout.count[row])
            columns = found[:, first : first + count]
            pictures = self._pictures[int(layout.req_slot[row])]
            if start >= pictures[-1].end:  # the usual case: rows of an answer
                columns += pictures[-1].shift
                continue
            for picture in pictures:
                columns[:, max(picture.end - start, 0) :] = (
                    layout.position[first : first + count][max(picture.end - start, 0) :] + picture.shift
                )
                begin, end = max(picture.start, start), min(picture.end, start + count)
                if begin < end:
                    has_picture = True
                    columns[:, begin - start : end - start] = picture.positions[
                        :, begin - picture.start : end - picture.start
                    ]
        return found if has_picture else found[0]
