"""The interface of drafters, which propose likely next tokens; one step verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from moeserve.worker.sequences import Int32s, StepLayout

NO_DRAFT: Final = np.zeros(0, np.int32)


class Wanted(NamedTuple):
    """A request for up to `most` tokens that may follow the first `length` tokens of the request in `slot`."""

    slot: int
    length: int
    most: int  # 0 or less: no drafts, but the drafter should learn the text


@dataclass(slots=True)
class Reading:
    """The time that a drafting model spends on reading texts before it can draft. The model writes it; `DraftRows`
    resets it for each step, and says on which device the model is."""

    ms: float = 0.0
    lagging: set[int] = field(default_factory=set)  # request slots whose texts are not read to their end
    on_gpu: bool = False  # a GPU may read, for which the host waits: wall time counts


class PendingTokens(NamedTuple):
    """The rows of a step whose tokens are being sampled, all at once. int32 [n] each, but places."""

    slots: Int32s  # request slots
    rows: Int32s  # of the step: each request's first row that samples; its drafts follow
    positions: Int32s  # of the first token sampled
    drafted: Int32s
    places: Int32s  # [1 + most drafts, n]: of each token among the step's sampled ones


@dataclass(slots=True)
class LateDrafts:
    """Drafts that a GPU is still computing when the host launches the step that verifies them: their tokens are
    placeholders, as those of `Sequences.expect`. `DraftRows` resets this for each step; the drafter writes it."""

    is_allowed: bool = False  # the step has no row beside the drafts' one
    slot: int | None = None  # request slot; None: no drafts are late
    read: Callable[[], Int32s] = lambda: NO_DRAFT  # waits for the drafts, and returns those that are verified
    # Milliseconds that the GPU took for the step's drafts, when they are known; None: it made none while the host did
    # something else.
    ms: Callable[[], float] | None = None
    # Launches the drafts of the next step, of requests whose last tokens are being sampled; `Wanted.length` does not
    # say where these begin. Returns False if it does not. The next `draft` takes these drafts. None: no drafter can.
    launch_ahead: Callable[[Sequence[Wanted], PendingTokens], bool] | None = None


class Drafter(Protocol):
    """Called by the step loop. Drafts affect only a request's speed, never its output."""

    def bind(self, slot: int, namespace: str) -> None:
        """Prepares for a new request in `slot`; the slot's old text is still readable. namespace: see NewSeq."""
        ...

    def catch_up(self) -> None:
        """Finishes postponed work on the steps so far. Called right before each `draft`."""
        ...

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        """Returns the drafts for each entry, each of a different request slot; empty without a good guess. The KV slots
        of the drafts' positions, and of the position before, are in the request's table. It is not called in a step in
        which nothing may be drafted, so a text may have grown by the tokens of several steps since the last call.
        Before another request is bound to a slot, the rest of the old one's text is told by an entry with `most` 0."""
        ...

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Takes a computed and sampled step. accepted: int32 [rows], accepted drafts per row."""
        ...
