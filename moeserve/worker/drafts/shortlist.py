"""Chooses the part of the vocabulary that the next-token block scores, as reading the head takes most of its time.

A wrong draft costs only speed, so tokens may be left out. The head's rows are stored in panels of 32. Scored are the
first eighth of the vocabulary, because byte-pair encodings number tokens by frequency, and the panels of tokens in
the request's own text (names, its language, digits). A request's drafts depend on no other request's text.

The coverage of a request is the share of its tokens that had been scored before they came. If it is low, as for
languages that were rare when the vocabulary was made, the whole head is read. Measured: docs/results/drafts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.kernels._C import PANEL_ROWS
from moeserve.models.head_shortlist import frequent_tokens
from moeserve.worker.sequences import Int32s

LEAST_COVERAGE: Final = 0.8
KEEP: Final = 0.98  # decay of the coverage per token
_NEVER: Final = -1


class Shortlist:
    def __init__(self, tokens: Int32s, vocab_size: int, frequent: int | None = None) -> None:
        """tokens: int32 [request slots, positions]. frequent: ids below it are always scored, a multiple of
        PANEL_ROWS; None: derived from the vocabulary's size. At most as many other tokens are scored."""
        if frequent is None:
            frequent = frequent_tokens(vocab_size)
        self._tokens = tokens
        self._first = frequent // PANEL_ROWS  # first panel beyond the frequent ones
        panels = -(-vocab_size // PANEL_ROWS)
        self._has_rest = self._first < panels
        slots = len(tokens)
        # Per slot: the position where each other panel was last seen.
        self._seen: Int32s = np.full((slots, max(panels - self._first, 0)), _NEVER, np.int32)
        self._known = [0] * slots  # tokens processed
        self.coverage: npt.NDArray[np.float32] = np.ones(slots, np.float32)

    def bind(self, slot: int) -> None:
        """Resets the slot for another request."""
        if self._has_rest:
            self._seen[slot] = _NEVER
            self._known[slot], self.coverage[slot] = 0, 1.0

    def panels(self, slots: Int32s, length: Int32s) -> Int32s | None:
        """Returns the panels to score for these requests, with `length` known tokens each: int32, ascending. None:
        all."""
        if not self._has_rest:
            return None
        for slot, end in zip(slots.tolist(), length.tolist(), strict=True):
            self._learn(slot, end)
        if (self.coverage[slots] < LEAST_COVERAGE).any():
            return None
        rest = np.unique(np.concatenate([self._latest(slot) for slot in slots.tolist()]))
        if 2 * (self._first + len(rest)) > self._first + self._seen.shape[1]:
            return None
        return np.concatenate([np.arange(self._first, dtype=np.int32), self._first + rest.astype(np.int32)])

    def _latest(self, slot: int) -> npt.NDArray[np.int64]:
        """Returns a request's other panels; the latest ones if there are too many."""
        seen = self._seen[slot]
        found = np.flatnonzero(seen != _NEVER)
        if len(found) <= self._first:
            return found
        return found[np.argpartition(seen[found], -self._first)[-self._first :]]

    def _learn(self, slot: int, end: int) -> None:
        first, self._known[slot] = self._known[slot], max(end, self._known[slot])
        if first >= end:
            return
        panels = self._tokens[slot, first:end] // PANEL_ROWS - self._first
        is_scored = panels < 0  # numbers of embedding spans are negative
        places = np.flatnonzero(~is_scored)
        rest = panels[places]
        was_seen = self._seen[slot, rest] != _NEVER
        _, firsts = np.unique(rest, return_index=True)
        is_first = np.zeros(len(rest), np.bool_)
        is_first[firsts] = True
        is_scored[places] = was_seen | ~is_first
        np.maximum.at(self._seen[slot], rest, first + places.astype(np.int32))
        self.coverage[slot] = _averaged(float(self.coverage[slot]), is_scored)


def _averaged(before: float, outcomes: Sequence[bool] | npt.NDArray[np.bool_]) -> float:
    """Returns a moving average updated by these outcomes, in order."""
    ages = np.arange(len(outcomes) - 1, -1, -1)
    taken: float = ((1.0 - KEEP) * KEEP**ages * outcomes).sum()
    return before * KEEP ** len(outcomes) + taken
