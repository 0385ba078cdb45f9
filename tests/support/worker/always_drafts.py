"""Imported by a server's processes (TESTS_CHANGE): every row may have all drafts, instead of as many as pay on this
machine while it does other things."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.router.core.request import DraftRecord


def _choose(
    self: DraftLength, records: Sequence[DraftRecord], context: int, most: int, budget: int
) -> tuple[list[int], float]:
    return [most] * len(records), float(most * len(records))


DraftLength.choose = _choose  # type: ignore[method-assign]
