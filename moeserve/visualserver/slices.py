"""Slices: a picture is encoded in pieces; between two pieces the tower waits for its device and rests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from moeserve.processes.tower_page import TowerPage
from moeserve.visualserver.encoding_pace import EncodingPace

LOOK_S: Final = 0.005  # seconds after which a resting tower notices that all answers have ended


class SliceDevice(Protocol):
    """The tower's device, as `Slices` uses it."""

    def wait(self, behind: int) -> None:
        """Blocks until at most `behind` of the slices that were launched are unfinished."""

    def used_s(self) -> float:
        """Returns the seconds of the whole device that this process has used; only differences count."""

    @property
    def stops_steps(self) -> bool:
        """True if a step may stand still during a slice. A GPU has no priorities among processes; a CPU has."""


class Slices:
    """Waits for the device after each slice of a picture, and rests. Only the encoding thread calls it."""

    def __init__(
        self,
        pace: EncodingPace,
        page: TowerPage,
        device: SliceDevice,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pace = pace
        self._page = page
        self._device = device
        self._clock = clock
        self._sleep = sleep
        # When the running slice began, and the seconds that were used before it.
        self._began = self._used = 0.0
        self._longest_ms = 0.0  # longest slice of the picture while requests were open
        page.encoding = 0.0, 0.0

    @contextmanager
    def picture(self) -> Iterator[None]:
        """A context manager for the encoding of one picture."""
        self._pace.began(self._clock())
        self._longest_ms = 0.0
        self._rest()
        try:
            yield
            self._account(1.0)  # the next picture rests
        finally:
            self._page.encoding = 0.0, 0.0

    def ended(self, progress: float) -> None:
        """Called by the tower between slices, with the fraction of the picture that is encoded then."""
        # Without open requests the GPU gets the next slice before it has finished this one. Further slices are not
        # launched ahead, because they could not be withdrawn when a request begins.
        self._device.wait(0 if self._page.open_requests else 1)
        self._account(progress)
        self._rest()

    def _account(self, progress: float) -> None:
        now, used = self._clock(), self._device.used_s()
        self._pace.slice_ended(now, self._began, used - self._used, progress)
        if self._page.open_requests:
            slice_ms = (now - self._began) * 1e3 if self._device.stops_steps else 0.0
            self._longest_ms = max(self._longest_ms, slice_ms)
            self._page.encoding = self._longest_ms, self._pace.share

    def _rest(self) -> None:
        while (rest := self._pace.rest(self._clock(), self._page.open_requests)) > 0.0:
            self._sleep(min(rest, LOOK_S))
        self._began, self._used = self._clock(), self._device.used_s()
