"""When a worker that computes a step counts as hung."""

from __future__ import annotations

import pytest

from moeserve.router.worker_deadline import GRACE_S, TIMES_EXPECTED, UNKNOWN_S, StepDeadline


@pytest.mark.parametrize(
    ("limit", "disk_wait", "expected_ms", "seconds"),
    [
        (None, 0.0, 0.0, UNKNOWN_S),
        (None, 0.0, 500.0, GRACE_S + TIMES_EXPECTED / 2),
        (None, 40.0, 0.0, UNKNOWN_S + 40),
        (None, 40.0, 500.0, GRACE_S + TIMES_EXPECTED / 2 + 40),
        (5.0, 40.0, 500.0, 5.0),  # the user's own limit
    ],
)
def test_due(limit: float | None, disk_wait: float, expected_ms: float, seconds: float) -> None:
    deadline = StepDeadline(limit, disk_wait)
    deadline.watch((1, expected_ms), 100.0)
    assert deadline.due == 100.0 + seconds
    deadline.watch((1, expected_ms), 110.0)
    assert deadline.due == 100.0 + seconds, "the same step"
    deadline.watch(None, 120.0)
    assert deadline.due is None
