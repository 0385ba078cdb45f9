"""Whether the work for an answer grows with its length alone."""

from __future__ import annotations

import time

from tests.support.chats.chat_events import (
    Make,
    events_of,
)


def assert_linear(make: Make, beginning: str, unit: str) -> None:
    """Eight times the text takes eight times as long; quadratic would be 64 times."""

    def seconds(count: int) -> float:
        text = beginning + unit * (count // len(unit))
        start = time.thread_time()
        events_of(make, [text[i : i + 5] for i in range(0, len(text), 5)])
        return time.thread_time() - start

    short = min(seconds(2_000) for _ in range(3))
    assert any(seconds(16_000) < 24 * short + 0.05 for _ in range(2))
