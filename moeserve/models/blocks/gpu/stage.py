"""A GPU's place where each of several has some of the layers: what comes before its own, and what comes behind.

    GPU 0   embedding, layers ──▶ GPU 1   layers ──▶ …      ──▶ GPU 0   head

A step may go through in parts ("micro-batches"), one behind the other: while a GPU computes one, the GPU before it
computes the next. A part is some rows of a step in order, so that the KV of those before is there.
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
    """The ends of one rank's layers. Owns nothing of a step but the parts whose rows are still to come back."""

    def __init__(self, link: StageLink, rank: int, num_ranks: int) -> None:
        self._link = link
        self._sent: list[tuple[int, int]] = []
        self._is_alone = False  # for timing this rank by itself: nothing is sent or waited for
        self.is_first = rank == 0
        self._is_last = rank == num_ranks - 1
        rows = len(link.inbox)
        # A part's padding may reach beyond the last row; it is not read.
        self.row_numbers = torch.arange(2 * rows, dtype=torch.int32, device=link.inbox.device)

    @property
    def inbox(self) -> Tensor:
        """float32 [rows, hidden]: of the first rank a step's rows behind all layers, else before its own layers."""
        return self._link.inbox

    @property
    def takes_parts(self) -> bool:
        """Else a step goes through whole."""
        return self._link.is_one_sided

    def be_alone(self, *, alone: bool) -> None:
        """From here on nothing is sent, nor waited for; or it is again."""
        self._is_alone = alone

    def begin(self, part: StepPart, size: int) -> None:
        """Before the layers, of a part padded to `size` rows."""
        if not self.is_first and not self._is_alone:
            self._link.receive((part.first_row, size))

    def end(self, part: StepPart, x: Tensor) -> None:
        """Behind the layers: x, float32 [size, hidden], goes on. When the first rank has sent a step's last part, it
        waits for all of them."""
        if self._is_alone:
            return
        self._link.send(x, part.first_row, more=self._is_last and not part.is_last)
        if not self.is_first:
            return
        self._sent.append((part.first_row, len(x)))
        if part.is_last:
            self._link.receive(*self._sent)
            self._sent = []
