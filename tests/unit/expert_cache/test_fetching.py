"""Which steps fetch missed experts."""

from __future__ import annotations

import pytest

from moeserve.placement.expert_cache.fetching import MOST_ROWS, rows_that_fetch


@pytest.mark.parametrize(
    ("top_k", "in_ram", "of_streams", "with_drafts"),
    [
        (8, 0.75, 1, 2),
        (8, 0.5, 2, 4),
        (8, 0.25, 3, 16),
        (4, 0.5, 3, 8),
        (8, 0.01, None, None),
        (8, 0.0, None, None),
    ],
)
def test_many_rows_or_few_slots(
    top_k: int, in_ram: float, of_streams: int | None, with_drafts: int | None
) -> None:
    for has_drafts, least in ((False, of_streams), (True, with_drafts)):
        rows = list(rows_that_fetch(top_k, in_ram, has_drafts=has_drafts))
        assert rows == ([] if least is None else list(range(least, MOST_ROWS + 1)))
