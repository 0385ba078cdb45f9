"""A page of shared memory through which the router and the visual server tell each other about their work.

router          writes the number of open requests, whose steps share the device with the vision tower
visual server   writes the tower's share of the device's time while it encodes a picture beside them

Each number is an aligned 8-byte float with one writer, so a reader sees the old or the new value. No process waits for
another, and the successor of a killed process finds the page as it is.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

_OPEN, _SLICE_MS, _SHARE = range(3)
_BYTES: Final = 3 * 8


class TowerPage:
    def __init__(self, path: Path) -> None:
        """Creates the file where it is missing. Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _BYTES)
            self._numbers = memoryview(mmap.mmap(file, _BYTES)).cast("d")
        finally:
            os.close(file)

    @property
    def open_requests(self) -> int:
        """Requests that the router has not answered to the end."""
        return int(self._numbers[_OPEN])

    @open_requests.setter
    def open_requests(self, requests: int) -> None:
        self._numbers[_OPEN] = requests

    @property
    def encoding(self) -> tuple[float, float]:
        """Milliseconds of the tower's longest slice, for which a step may have to wait, and the share of the time that
        all slices take; zeros while no picture is encoded."""
        return self._numbers[_SLICE_MS], self._numbers[_SHARE]

    @encoding.setter
    def encoding(self, load: tuple[float, float]) -> None:
        self._numbers[_SLICE_MS], self._numbers[_SHARE] = load
