"""Shows the progress of a download: a bar on a terminal, log lines if there is none."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from tqdm import tqdm

LOG_EVERY_S = 5.0  # without a terminal

log = logging.getLogger(__name__)

Told = Callable[[int, int], None]


class DownloadProgress:
    """The progress of all files of a model together. Its `file` method replaces the class of progress bars that
    `http_get` would use."""

    def __init__(self, total: int, tell: Told | None = None) -> None:
        """`total`: bytes. `tell`: called with the bytes that are there, and `total`."""
        self._total = total
        self._tell = tell
        self._done = 0
        self._logged = time.monotonic()
        self._bar: tqdm[None] = tqdm(
            desc="downloading",
            total=total,
            unit="B",
            unit_scale=True,
            disable=are_progress_bars_disabled() or not sys.stderr.isatty(),
        )

    def update(self, nbytes: float | None = 1) -> None:
        """Adds `nbytes` bytes; a negative number if the server starts a file again."""
        nbytes = int(nbytes or 0)
        self._done += nbytes
        self._bar.update(nbytes)
        if self._tell is not None:
            self._tell(self._done, self._total)
        now = time.monotonic()
        if self._bar.disable and now - self._logged >= LOG_EVERY_S:
            self._logged = now
            log.info("downloading: %.2f of %.2f GB", self._done / 1e9, self._total / 1e9)

    def file(self, initial: int = 0, **_: Any) -> DownloadProgress:
        """Returns the bar for one file, which is this same bar; `initial` bytes of the file were there before."""
        self.update(initial)
        return self

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> DownloadProgress:
        """Does nothing: `http_get` enters and leaves the bar once per file, but the bar lasts for all files."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
