"""A download as the user sees it: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from tqdm import tqdm

LOG_EVERY_S = 5.0  # where there is no terminal

log = logging.getLogger(__name__)

Told = Callable[[int, int], None]


class DownloadProgress:
    """The progress of all files of a model together. Its `file` is what `http_get` takes for a class of bars."""

    def __init__(self, total: int, tell: Told | None = None) -> None:
        """`total`: bytes. `tell` gets the bytes that are there, and `total`."""
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
        """Adds `nbytes` bytes; a negative number when the server starts a file over."""
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
        """A bar for one file, which is this one; `initial` bytes of it were there before."""
        self.update(initial)
        return self

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> DownloadProgress:
        """http_get enters the bar of each file; it outlives them."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
