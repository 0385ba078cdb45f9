"""DiskWait says in the log that results of batches wait for the disk: once when the first begins to wait, once when
none waits any more."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class DiskWait:
    """Counts those results of all batches that wait. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._cause = ""  # the last one that the log named; empty: no result waits
        self._waiting = 0
        self._waited = 0  # results, since the log said that they wait

    def begin(self, error: OSError) -> None:
        """Notes that one more result waits, because of `error`."""
        self._waiting += 1
        self._waited += 1
        self.again(error)

    def again(self, error: OSError) -> None:
        """Notes that a result still waits. `error`: the current cause, which may have changed."""
        if str(error) != self._cause:
            self._cause = str(error)
            log.error("results of batches wait until their folder can be written again: %s", error)

    def end(self) -> None:
        """Notes that a result has been stored after all."""
        self._waiting -= 1
        if self._waiting == 0:
            log.info("results of batches are written again: %d had waited", self._waited)
            self._cause, self._waited = "", 0
