"""Drafts by look-up in the request's own tokens (prompt look-up): if the last tokens occurred earlier, the tokens
that followed them then are drafted.

    ... the cat sat on the mat . ... the cat sat
        `- earlier place -´          `- the last tokens
                    on the mat       is drafted

Places with the same `shortest` tokens are chained, latest first. Among the last CANDIDATES places, the one with the
longest match is taken, on ties the latest. The draft is as long as the match, or as long as wanted if `longest`
tokens match: short matches are often coincidences. A new token costs one dictionary look-up, however long the text.
If nothing matches, other requests' texts are searched (`shared_texts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.drafts.shared_texts import SharedTexts, hashes_of
from moeserve.worker.sequences import Int32s, StepLayout

CANDIDATES: Final = 16
NONE: Final = -1


class NgramDrafter:
    """A `Drafter` that reads the worker's token table."""

    def __init__(
        self, tokens: Int32s, shortest: int, longest: int, shared: SharedTexts | None = None
    ) -> None:
        """tokens: int32 [request slots, positions]. shortest: matching tokens needed for a draft; longest: match
        length beyond which candidates are equal. shared: other requests' texts, searched if the own text has no
        match."""
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        self._shared = shared
        slots, positions = tokens.shape
        # Per slot: hash → latest place, and place → the previous place with the same hash. A place is the position of
        # its last token.
        self._last: list[dict[int, int]] = [{} for _ in range(slots)]
        self._before: Int32s = np.zeros((slots, positions), np.int32)
        self._known = [0] * slots  # tokens whose places are stored
        self._given = [0] * slots  # of these, tokens also in the shared texts
        self._namespaces = [""] * slots

    def bind(self, slot: int, namespace: str) -> None:
        self._share_texts()
        self._given[slot], self._namespaces[slot] = 0, namespace
        self._last[slot] = {}
        self._known[slot] = 0

    def catch_up(self) -> None:
        """Does nothing; the text is learnt in `draft`."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        return [self._draft(*one) for one in wanted]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Does nothing; the text is learnt in `draft`."""

    def _draft(self, slot: int, length: int, most: int) -> Int32s:
        self._learn(slot, length)
        if most <= 0 or length < self._shortest:
            return NO_DRAFT
        text = self._tokens[slot]
        place, best, longest = int(self._before[slot, length - 1]), NONE, self._shortest - 1
        for _ in range(CANDIDATES):
            if place < self._shortest - 1:
                break
            agreeing = self._agreeing(text, place, length - 1)
            if agreeing > longest:
                best, longest = place, agreeing
            if longest >= self._longest:
                break
            place = int(self._before[slot, place])
        if best == NONE:
            return self._from_others(slot, length, most)
        if longest < self._longest:
            most = min(most, longest)
        # A repetition with a period shorter than the draft is continued periodically.
        period = length - 1 - best
        draft: Int32s = text[best + 1 + np.arange(most) % period]
        return draft

    def _from_others(self, slot: int, length: int, most: int) -> Int32s:
        if self._shared is None or length < self._shared.match:
            return NO_DRAFT
        last = self._tokens[slot, length - self._shared.match : length]
        return self._shared.following(self._namespaces[slot], last, most)

    def _share_texts(self) -> None:
        """Adds all texts to the shared ones, since a new request may repeat them."""
        if self._shared is None:
            return
        for slot, known in enumerate(self._known):
            given = self._given[slot]
            if known > given:
                self._given[slot] = known
                text = self._tokens[slot, max(given - self._shared.match, 0) : known]
                self._shared.add(self._namespaces[slot], text)

    def _agreeing(self, text: Int32s, place: int, last: int) -> int:
        """Returns how many tokens up to `place` equal those up to `last`, at most `longest`."""
        most = min(self._longest, place + 1)
        differ = text[place - most + 1 : place + 1] != text[last - most + 1 : last + 1]
        where = np.flatnonzero(differ)
        return most if len(where) == 0 else most - 1 - int(where[-1])

    def _learn(self, slot: int, length: int) -> None:
        """Stores the places of the tokens since the last call."""
        first = max(self._known[slot], self._shortest - 1)
        self._known[slot] = max(length, self._known[slot])
        if first >= length:
            return
        hashes = hashes_of(self._tokens[slot, first - self._shortest + 1 : length], self._shortest)
        last, before = self._last[slot], self._before[slot]
        if length - first <= CANDIDATES:
            for place, hashed in enumerate(hashes.tolist(), first):
                before[place] = last.get(hashed, NONE)
                last[hashed] = place
            return
        # A whole prompt at once: sorted by hash and place, each place follows the previous one with its hash.
        order = np.argsort(hashes, kind="stable")
        places = order.astype(np.int32) + first
        is_same = hashes[order[1:]] == hashes[order[:-1]]
        before[places[1:]] = np.where(is_same, places[:-1], NONE)
        before[places[0]] = NONE
        if last:
            for place in places[np.concatenate(([True], ~is_same))].tolist():
                before[place] = last.get(int(hashes[place - first]), NONE)
        last.update(zip(hashes.tolist(), range(first, length), strict=True))
