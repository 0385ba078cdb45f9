"""A GPU's stage in pipeline parallelism, where each GPU has some of the layers: its links to the stages before and
after.

    GPU 0   embedding, layers ──▶ GPU 1   layers ──▶ …      ──▶ GPU 0   head

A step may pass in parts ("micro-batches"): while a GPU computes one part, the GPU before it computes the next.
Parts take a step's rows in order, so that the KV of earlier rows is already stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.collectives.stage_link import StageLink


@dataclass(frozen=True, slots=True)
class StepPart:
    """Rows of a step that go through the layers together."""

    first_row: int
    is_last: bool


WHOLE = StepPart(0, True)


class Stage:
    """The input and output of one rank's layers. Owns the list of parts that have been sent and not yet come back."""

    def __init__(self, link: StageLink, rank: int, num_ranks: int) -> None:
        self._link = link
        self._sent: list[tuple[int, int]] = []
        self._is_alone = False  # while this rank is timed by itself: it neither sends nor waits
        self.is_first = rank == 0
        self._is_last = rank == num_ranks - 1
        rows = len(link.inbox)
        # A part's padding may reach past the last row; padding is not read.
        self.row_numbers = torch.arange(2 * rows, dtype=torch.int32, device=link.inbox.device)

    @property
    def inbox(self) -> Tensor:
        """Returns float32 [rows, hidden]: on the first rank, a step's rows after all layers; on others, the input of
        their layers."""
        return self._link.inbox

    @property
    def takes_parts(self) -> bool:
        """True if steps may be divided into parts."""
        return self._link.is_one_sided

    def be_alone(self, *, alone: bool) -> None:
        """Switches sending and waiting off (alone=True) or on again."""
        self._is_alone = alone

    def begin(self, part: StepPart, size: int) -> None:
        """Waits for the input of a part that is padded to `size` rows. Must be called before the layers."""
        if not self.is_first and not self._is_alone:
            self._link.receive((part.first_row, size))

    def end(self, part: StepPart, x: Tensor) -> None:
        """Sends x, float32 [size, hidden], to the next rank. Must be called after the layers. After a step's last part,
        the first rank waits until all parts have come back."""
        if self._is_alone:
            return
        self._link.send(x, part.first_row, more=self._is_last and not part.is_last)
        if not self.is_first:
            return
        self._sent.append((part.first_row, len(x)))
        if part.is_last:
            self._link.receive(*self._sent)
            self._sent = []
