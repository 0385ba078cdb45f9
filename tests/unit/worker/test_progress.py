"""Loading as the user and /health see it."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.schema import LoadProgress, ToHttp
from moeserve.worker.loading import progress
from moeserve.worker.loading.progress import LoadingBar

TOTAL = 3 << 30


@pytest.fixture
def line(tmp_path: Path) -> Iterator[tuple[PushChannel, PullChannel[ToHttp]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'http'}"
    yield PushChannel(context, address), PullChannel(context, address, codec.TO_HTTP)
    context.destroy(linger=0)


def load(bar: LoadingBar, steps: int = 3000) -> None:
    for i in range(steps + 1):
        bar("weights", TOTAL * i // steps, TOTAL)
    bar.close()


def news(inbox: PullChannel[ToHttp]) -> list[ToHttp]:
    """Up to the news that all is there."""
    received: list[ToHttp] = []
    while not received or received[-1] != LoadProgress("weights", TOTAL, TOTAL):
        message = inbox.recv(timeout=30)
        assert message is not None, received
        received.append(message)
    return received


def test_health_hears_the_first_the_last_and_not_too_much(
    line: tuple[PushChannel, PullChannel[ToHttp]],
) -> None:
    started = time.monotonic()
    load(LoadingBar(line[0], io.StringIO()))
    most = 3 + (time.monotonic() - started) / progress.NEWS_EVERY_S
    heard = news(line[1])
    assert heard[0] == LoadProgress("weights", 0, TOTAL)
    assert len(heard) <= most


def test_terminal_shows_a_bar(line: tuple[PushChannel, PullChannel[ToHttp]]) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        bar = LoadingBar(line[0], terminal)
        bar("weights", TOTAL // 2, TOTAL)
        shown = os.read(ours, 1000).decode()
        bar.close()
    os.close(ours)
    assert "weights" in shown
    assert "/3.00G" in shown


def test_log_file_gets_plain_lines_now_and_then(
    line: tuple[PushChannel, PullChannel[ToHttp]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    bar = LoadingBar(line[0], stream)
    for seconds, done in ((0.0, 0), (1.0, 2), (2.5, 5), (3.0, 6), (8.0, 16)):
        now = 100.0 + seconds
        bar("weights", TOTAL * done // 20, TOTAL)
    assert caplog.messages == [
        "weights: 0.8 of 3.0 GiB, 0.30 GiB/s, 8 s left",  # after 2.5 s
        "weights: 2.4 of 3.0 GiB, 0.30 GiB/s, 2 s left",
    ]
    assert stream.getvalue() == ""
    caplog.clear()
    load(LoadingBar(line[0], stream))
    assert caplog.messages == [], "a fast load says nothing"
