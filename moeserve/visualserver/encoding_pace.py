"""How long the tower rests between two slices of a picture, so that running answers keep their speed.

The tower and the engine compute on the same device, so what the tower takes, steps lose. While requests are open, the
tower therefore takes at most `share` of the time: a slice that took d seconds is followed by a rest until d / share
seconds after its begin. The loss of running answers is at most that share, even if steps stand still during a slice.

Nothing waits without end. The share grows as far as a picture needs to be encoded `patience` seconds after its begin;
if the whole device does not suffice for that, there are no rests.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 60.0


class EncodingPace:
    """Times are seconds of the caller's clock."""

    def __init__(self, share: float, patience: float = PATIENCE_S) -> None:
        """0 < share <= 1: of the device's time, for all pictures together, while requests are open."""
        self._least_share = share
        self._patience = patience
        self._resume_at = 0.0
        self._due = 0.0  # when the picture should be ready
        self._taken = 0.0  # by its slices
        self.share = share  # current one

    def began(self, now: float) -> None:
        """Begins a picture. A rest that its predecessor owes remains."""
        self._due = now + self._patience
        self._taken = 0.0
        self.share = self._least_share

    def slice_ended(self, now: float, began: float, taken: float, progress: float) -> None:
        """Accounts for a slice. taken: seconds of the whole device. 0 < progress <= 1: fraction of the picture that is
        encoded now."""
        self._taken += taken
        self.share = self._needed_share(now, progress)
        self._resume_at = max(began + taken / self.share, self._resume_at)

    def rest(self, now: float, open_requests: int) -> float:
        """Returns the seconds until the next slice may begin. Without open requests a rest that is owed is
        forgotten."""
        if not open_requests:
            self._resume_at = now
        return max(self._resume_at - now, 0.0)

    def _needed_share(self, now: float, progress: float) -> float:
        rest = self._taken / progress - self._taken
        left = self._due - now
        needed = rest / left if rest < left else 1.0
        return max(self._least_share, needed)
