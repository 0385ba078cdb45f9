"""While the disk is full, results of batches wait, and the log says so once."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any, cast

import pytest

from moeserve.httpserver.batches import runner as runner_module
from moeserve.httpserver.batches.input_lines import Line
from moeserve.httpserver.batches.outcomes import Outcome
from moeserve.httpserver.batches.runner import BatchRunner

RESULTS = 30


class Server:
    most_at_once = 8
    is_busy = False

    def __init__(self) -> None:
        self.counts = self
        self.counted: list[str] = []

    def batch_request(self, outcome: str) -> None:
        self.counted.append(outcome)

    def batch_requests_left(self, count: int) -> None: ...


class FullDisk:
    """A batch whose folder takes no result for the first attempts, each counted for itself."""

    def __init__(self, causes: list[int]) -> None:
        self.causes = causes  # errno of each attempt of a result
        self.attempts: dict[str, int] = {}
        self.kept: list[str] = []

    async def keep(self, outcome: Outcome) -> None:
        attempt = self.attempts.get(outcome.custom_id, 0)
        self.attempts[outcome.custom_id] = attempt + 1
        if attempt < len(self.causes):
            raise OSError(self.causes[attempt], "no room")
        self.kept.append(outcome.custom_id)


class AnswersAtOnce(BatchRunner):
    async def _outcome(self, running: Any, line: Line) -> Outcome:
        return Outcome(line.custom_id, "succeeded", 200)


def messages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, disk: FullDisk) -> list[str]:
    """Answers RESULTS lines of a batch on that disk; returns what the log says."""
    monkeypatch.setattr(runner_module, "DISK_WAIT_S", 0.001)
    caplog.set_level(logging.INFO, "moeserve.httpserver.batches")
    server = Server()
    runner = AnswersAtOnce(cast(Any, server), cast(Any, None))

    async def answer_all() -> None:
        lines = [Line(f"{number}", 0, 0) for number in range(RESULTS)]
        await asyncio.gather(*(asyncio.create_task(runner._answer(cast(Any, disk), line)) for line in lines))

    asyncio.run(answer_all())
    assert len(disk.kept) == RESULTS
    assert server.counted == ["succeeded"] * RESULTS
    return [record.getMessage() for record in caplog.records]


def test_results_that_wait_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert messages(monkeypatch, caplog, FullDisk([errno.ENOSPC] * 4)) == [
        f"results of batches wait until their folder can be written again: [Errno {errno.ENOSPC}] no room",
        f"results of batches are written again: {RESULTS} had waited",
    ]


def test_another_cause_is_told_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said = messages(monkeypatch, caplog, FullDisk([errno.ENOSPC, errno.EIO]))
    assert len(said) == 3
    assert f"[Errno {errno.EIO}]" in said[1]


def test_where_there_is_room_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert messages(monkeypatch, caplog, FullDisk([])) == []
