"""Where a step's rows rotate to, where pictures have three positions a row: time, height and width.

Text rotates by one position, which behind a picture is not its place in the sequence: a picture of h x w tokens takes
h * w places and max(h, w) positions.
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
    shift: int  # of all behind it: its position less its place

    @property
    def end(self) -> int:
        return self.start + int(self.positions.shape[1])


class RotaryPositions:
    """One writer: the runner."""

    def __init__(self) -> None:
        self._pictures: dict[int, list[_Picture]] = {}  # by request slot, in order

    def bind(self, slot: int, spans: Sequence[EmbeddingSpan]) -> None:
        """All spans of the request that have positions. Overwrites what the slot held."""
        self._pictures.pop(slot, None)
        pictures = []
        for span in spans:
            if span.positions:
                positions = np.frombuffer(span.positions, np.int32).reshape(SECTIONS, -1)
                pictures.append(_Picture(span.start, positions, int(positions.max()) + 1 - span.end))
        if pictures:
            self._pictures[slot] = pictures

    def of_step(self, layout: StepLayout) -> Int32s:
        """int32 [n]; [3, n] where a row is of a picture."""
        rows = [row for row, slot in enumerate(layout.req_slot.tolist()) if slot in self._pictures]
        if not rows:
            return layout.position
        found: Int32s = np.tile(layout.position, (SECTIONS, 1))
        has_picture = False
        for row in rows:
            first, start, count = int(layout.offset[row]), int(layout.start[row]), int(layout.count[row])
            columns = found[:, first : first + count]
            for picture in self._pictures[int(layout.req_slot[row])]:
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
