"""Background requests: which steps have rows of them while other requests are open.

A background request has the lowest priority, `BACKGROUND_PRIORITY`: it is a line of an offline batch. If no other
request is open, background requests are scheduled like all others. Otherwise they get BACKGROUND_SHARE of the time, in
turns: the time that their rows and prompts add to a step becomes a debt. Every step pays off a part of the debt in
proportion to its own length, and no background row is planned while there is debt. So other answers keep 1 -
BACKGROUND_SHARE of their speed. Turns with many background rows are cheaper than a few background rows in every step,
because the experts that a step reads serve all of its rows.
"""

from __future__ import annotations

from moeserve.router.core.request import Request

BACKGROUND_SHARE = 0.06  # of the time, beside other requests
MOST_LATE = (
    2.0  # a late step is charged at most this multiple of its predicted duration; the rest has other causes
)


class BackgroundShare:
    def __init__(self) -> None:
        self._background = 0  # open requests
        self._others = 0
        self._debt_ms = 0.0

    def joined(self, request: Request) -> None:
        """Notes a new request."""
        self._background += request.is_background
        self._others += not request.is_background

    def left(self, request: Request) -> None:
        """Notes the end of a request."""
        self._background -= request.is_background
        self._others -= not request.is_background

    @property
    def is_mixed(self) -> bool:
        """True if both background and other requests are open."""
        return bool(self._background and self._others)

    @property
    def has_turn(self) -> bool:
        """True if the next step may have background rows."""
        return not self.is_mixed or self._debt_ms <= 0.0

    def planned(self, others_ms: float, added_ms: float) -> None:
        """Accounts for a step that takes `others_ms` without its background rows and prompts, which add `added_ms`."""
        if not self.is_mixed:
            self._debt_ms = 0.0
            return
        earned = others_ms * BACKGROUND_SHARE / (1.0 - BACKGROUND_SHARE)
        self._debt_ms = max(self._debt_ms + added_ms - earned, 0.0)

    def corrected(self, expected_ms: float, actual_ms: float) -> None:
        """Corrects the account by the difference between the duration of a step with background rows and its
        prediction."""
        late_ms = min(actual_ms - expected_ms, (MOST_LATE - 1.0) * expected_ms)
        self._debt_ms = max(self._debt_ms + late_ms, 0.0)
