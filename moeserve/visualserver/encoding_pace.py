"""Decides how long the tower rests between two slices of a picture, so that running answers keep their speed.

The tower and the engine compute on the same device, so steps lose the time that the tower takes. While requests are
open, the tower therefore takes at most `share` of the time: after a slice of d seconds it rests until d / share seconds
after the slice's beginning. Running answers lose at most that share, even if steps stand still during a slice.

Every picture is finished in bounded time. The share grows as far as is needed to finish a picture `patience` seconds
after its beginning. If the whole device does not suffice for that, the tower does not rest.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 60.0


class EncodingPace:
    """Computes the rests between slices. Times are in seconds of the caller's clock."""

    def __init__(self, share: float) -> None:
        """share: part of the device's time for all pictures together while requests are open, 0 < share <= 1."""
        self._least_share = share
        self._resume_at = 0.0
        self._due = 0.0  # when the picture should be ready
        self._taken = 0.0  # seconds that the picture's slices took
        self.share = share  # the current share

    def began(self, now: float) -> None:
        """Begins a picture. A rest that the picture before it owes remains due."""
        self._due = now + PATIENCE_S
        self._taken = 0.0
        self.share = self._least_share

    def slice_ended(self, now: float, began: float, taken: float, progress: float) -> None:
        """Accounts for a slice. taken: seconds of the whole device. progress: fraction of the picture that is encoded
        now, 0 < progress <= 1."""
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
