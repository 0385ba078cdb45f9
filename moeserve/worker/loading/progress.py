"""Reports the loading progress: a bar on a terminal, log lines if there is none, and messages for /health."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from tqdm import tqdm

from moeserve.config.units import GIB
from moeserve.messages.channels import PushChannel
from moeserve.messages.schema import LoadProgress
from moeserve.models.loading.progress import COUNTED

NEWS_EVERY_S = 0.1  # interval of messages to httpserver
LOG_AFTER_S = 2.0  # first log line without a terminal
LOG_EVERY_S = 5.0  # interval of further log lines

log = logging.getLogger(__name__)


class LoadingBar:
    """An `OnProgress` callback; close it at the end."""

    def __init__(self, to_http: PushChannel, stream: TextIO = sys.stderr, *, may_draw: bool = True) -> None:
        self._to_http = to_http
        self._may_draw = may_draw and stream.isatty()
        self._stream = stream
        self._bar: tqdm[None] | None = None
        self._bar_stage = ""
        self._stage = ""
        self._told = 0.0  # time of the last message to httpserver
        self._log_at = time.monotonic() + LOG_AFTER_S
        self._began = (0.0, 0)  # (time, amount done) at the start of the stage

    def __call__(self, stage: str, done: int, total: int) -> None:
        changed = stage != self._stage or done == total
        now = time.monotonic()
        if stage != self._stage:
            self._began = now, done
        self._stage = stage
        if changed or now - self._told >= NEWS_EVERY_S:
            self._told = now
            # Dropped if httpserver is too busy: the next message contains everything.
            self._to_http.try_send(LoadProgress(stage=stage, done=done, total=total))
        if self._may_draw:
            self._draw(stage, done, total)
        elif now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            self._log(now, stage, done, total)

    def _log(self, now: float, stage: str, done: int, total: int) -> None:
        if stage in COUNTED:
            log.info("%s: %d of %d", stage, done, total)
            return
        then, done_then = self._began
        rate = (done - done_then) / max(now - then, 1e-3)  # bytes per second
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        log.info("%s: %.1f of %.1f GiB, %.2f GiB/s%s", stage, done / GIB, total / GIB, rate / GIB, left)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _draw(self, stage: str, done: int, total: int) -> None:
        if self._bar is not None and COUNTED.get(stage) != COUNTED.get(self._bar_stage):
            self._bar.close()  # the next stage has another unit
            self._bar = None
        self._bar_stage = stage
        if self._bar is None:
            self._bar = tqdm(
                desc=stage,
                total=total,
                file=self._stream,
                unit=f" {COUNTED[stage]}" if stage in COUNTED else "B",
                unit_scale=stage not in COUNTED,
                unit_divisor=1024,
                leave=False,
            )
        self._bar.set_description(stage, refresh=False)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
