"""Which tokens may be drafted: the frequent ones, and those of the request's own text."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.models.head_shortlist import LEAST_VOCABULARY
from moeserve.worker.drafts.shortlist import KEEP, LEAST_COVERAGE, Shortlist
from moeserve.worker.sequences import Int32s

FREQUENT, PANELS = 64, 40  # ids; panels of the vocabulary


def texts(*rows: list[int]) -> Int32s:
    table = np.zeros((len(rows), 4096), np.int32)
    for slot, row in enumerate(rows):
        table[slot, : len(row)] = row
    return table


def panels_of(shortlist: Shortlist, *lengths: int) -> list[int] | None:
    found = shortlist.panels(np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32))
    return None if found is None else found.tolist()


def test_frequent_tokens_and_the_text() -> None:
    """As far as it is known; pictures' numbers are no tokens."""
    shortlist = Shortlist(texts([5, -7, 100, 3, 1000, 63]), 32 * PANELS - 9, FREQUENT)
    assert panels_of(shortlist, 3) == [0, 1, 3]
    assert panels_of(shortlist, 6) == [0, 1, 3, 31]
    assert panels_of(shortlist, 5) == [0, 1, 3, 31]
    shortlist.bind(0)
    assert panels_of(shortlist, 3) == [0, 1, 3]


def test_requests_of_a_step() -> None:
    """A row is scored for all of a step's requests; where the whole head would be half of it, all is."""
    rows = [[70] * 9, [300], [640, 70]]
    shortlist = Shortlist(texts(*rows), 32 * PANELS, FREQUENT)
    assert panels_of(shortlist, 9, 1, 2) == [0, 1, 2, 9, 20]
    assert panels_of(Shortlist(texts([70, 100]), 32 * 7, FREQUENT), 2) is None


def test_latest_of_a_long_text() -> None:
    """As many beside the frequent ones as those are."""
    text = [1] * 100 + [32 * panel for panel in (2, 3, 4, 2, 5)]
    shortlist = Shortlist(texts(text), 32 * PANELS, FREQUENT)
    assert panels_of(shortlist, len(text)) == [0, 1, 2, 5]


@pytest.mark.parametrize("pieces", [[4000], [7, 100, 101, 400, 4000]])
def test_coverage(pieces: list[int]) -> None:
    """A token is covered if it is frequent or its panel was seen before; in pieces as at once."""
    rng = np.random.default_rng(1)
    text = [int(token) for token in rng.zipf(1.3, 4000) % (32 * PANELS)]
    expected, seen = 1.0, set[int]()
    for token in text:
        is_covered = token < FREQUENT or token // 32 in seen
        expected = KEEP * expected + (1.0 - KEEP) * is_covered
        seen.add(token // 32)
    shortlist = Shortlist(texts(text), 32 * PANELS, FREQUENT)
    for length in pieces:
        panels_of(shortlist, length)
    assert shortlist.coverage[0] == pytest.approx(expected, abs=1e-5)


def test_text_of_rare_tokens() -> None:
    """All tokens are scored until the text is of known ones again."""
    rare = [32 * panel for panel in range(2, PANELS)]
    text = rare + [1] * 60
    shortlist = Shortlist(texts(text), 32 * PANELS, FREQUENT)
    assert panels_of(shortlist, len(rare)) is None
    assert shortlist.coverage[0] < LEAST_COVERAGE
    assert panels_of(shortlist, len(text)) == [0, 1, PANELS - 2, PANELS - 1]


def test_size_of_a_vocabulary() -> None:
    assert panels_of(Shortlist(texts([1]), LEAST_VOCABULARY - 1), 1) is None
    found = panels_of(Shortlist(texts([1]), 248_320), 1)
    assert found is not None
    assert len(found) == 248_320 // 8 // 32
