"""BatchInProgress: a batch whose lines are being answered, with its pending lines and the journals of results."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

from moeserve.httpserver.batches.input_lines import Line, Lines, read_line, read_lines
from moeserve.httpserver.batches.journal import Journal
from moeserve.httpserver.batches.outcomes import Kind, Outcome, Tally, is_error_line, line_of
from moeserve.httpserver.batches.records import Batch, LineError, StoredFile
from moeserve.httpserver.batches.store import RETENTION_S, BatchStore, recovered_tally
from moeserve.httpserver.transport.errors import ApiError

GIVEN_UP_AT_ONCE: Final = 256  # lines


class BatchInProgress:
    def __init__(
        self, store: BatchStore, batch: Batch, lines: list[Line], tally: Tally, file: BinaryIO
    ) -> None:
        """tally: counts the lines with a result. file: the batch's requests."""
        self.batch = batch
        self.tally = tally
        self.pending = deque(line for line in lines if line.custom_id not in tally.done)
        self.num_open = 0  # lines being answered; written by the runner
        # No more lines begin, because the batch is cancelled or late; written by the runner.
        self.takes_no_more = False
        self._store = store
        self._saving = asyncio.Lock()
        self._has_unsaved_losses = False
        self._file = file
        path = store.folder.path
        self._output = Journal(path / batch.output)
        self._errors = Journal(path / batch.error_output) if batch.style == "openai" else self._output

    @classmethod
    async def begin(
        cls, store: BatchStore, batch: Batch, knows_model: Callable[[str], bool]
    ) -> BatchInProgress | None:
        """Checks a new batch's input, or reads the results of a batch that an earlier server began. Returns None if the
        batch failed because its input is wrong. Raises ApiError, OSError."""
        known = store.tallies.get(batch.id)
        lines, tally, file = await store.on_disk(_load, store.folder.path, batch, known, knows_model)
        if batch.in_progress_at is None:
            batch.total = len(lines.lines)
            if lines.errors:
                batch.status, batch.errors, batch.ended_at = "failed", lines.errors, int(time.time())
            else:
                batch.in_progress_at = int(time.time())
                if batch.status == "validating":  # it may have been cancelled meanwhile
                    batch.status = "in_progress"
            await store.save(batch)
        if batch.is_ended or file is None:
            store.tallies.pop(batch.id, None)
            if file is not None:
                file.close()
            return None
        running = cls(store, batch, lines.lines, tally, file)
        store.tallies[batch.id] = tally
        return running

    def take(self) -> Line | None:
        """Returns the next line to answer; None if there is none."""
        if self.takes_no_more or self.batch.status == "cancelling" or not self.pending:
            return None
        return self.pending.popleft()

    def put_back(self, line: Line) -> None:
        self.pending.appendleft(line)

    async def body_of(self, line: Line) -> dict[str, Any]:
        request = await asyncio.to_thread(read_line, self._file, line)
        body: dict[str, Any] = request["body"]
        return body

    def is_suspect(self, line: Line) -> bool:
        """Returns whether a server has ended while it was answering the line."""
        return line.custom_id in self.batch.losses

    async def add_loss(self, line: Line) -> int:
        """Counts a server that has ended while it was answering the line. The count is also on disk, so that the next
        server continues it. Returns the count. Raises ApiError with status 500 if the folder cannot be written."""
        losses = self.batch.losses
        losses[line.custom_id] = losses.get(line.custom_id, 0) + 1
        self._has_unsaved_losses = True
        await self._save_losses()
        return losses[line.custom_id]

    async def _save_losses(self) -> None:
        async with self._saving:
            if self._has_unsaved_losses:
                await self._store.save(self.batch)
                self._has_unsaved_losses = False

    async def keep(self, outcome: Outcome) -> None:
        """Stores a result; returns when it is on the disk. Raises OSError."""
        line = line_of(self.batch.style, outcome)
        journal = self._errors if is_error_line(self.batch.style, outcome) else self._output
        await journal.append(line)
        self.tally.add(outcome)
        self.batch.losses.pop(outcome.custom_id, None)
        self._store.grew(self.batch, len(line) + 1)

    async def give_up(self, kind: Kind) -> None:
        """Writes a result of this kind for each request without one. Raises OSError."""
        while self.pending:
            some = [self.pending[place] for place in range(min(GIVEN_UP_AT_ONCE, len(self.pending)))]
            await asyncio.gather(*(self.keep(Outcome(line.custom_id, kind)) for line in some))
            for _ in some:
                self.pending.popleft()

    async def end(self) -> None:
        """Makes the results available to the client, once all lines have one. Raises ApiError with status 500 if the
        folder cannot be written."""
        batch, now = self.batch, int(time.time())
        batch.finalizing_at = batch.finalizing_at or now
        await self.close()
        if batch.style == "openai":
            batch.has_output = await self._publish(batch.output_file_id, batch.output, "output")
            batch.has_errors = await self._publish(batch.error_file_id, batch.error_output, "error")
        if batch.status == "cancelling":
            batch.status = "cancelled"
        else:
            batch.status = "expired" if self.tally.kinds["expired"] else "completed"
        batch.ended_at, batch.counts = now, dict(self.tally.kinds)
        await self._store.save(batch)
        self._store.tallies.pop(batch.id, None)

    async def close(self) -> None:
        with contextlib.suppress(ApiError):  # a full disk; the count of a line is lower then
            await self._save_losses()
        await self._output.close()
        if self._errors is not self._output:
            await self._errors.close()
        self._file.close()

    async def _publish(self, file_id: str, data: str, what: str) -> bool:
        """Adds a journal to the client's files. Returns False, without adding it, if it has no lines."""
        batch, now = self.batch, int(time.time())
        if not (size := self._store.folder.size(data)):
            await self._store.on_disk(self._store.folder.remove, data)
            return False
        keep = batch.output_expires_after or RETENTION_S
        await self._store.add_file(
            StoredFile(
                id=file_id,
                owner=batch.owner,
                filename=f"{batch.id}_{what}.jsonl",
                purpose="batch_output",
                bytes=size,
                created_at=now,
                expires_at=now + keep,
                data=data,
            )
        )
        return True


def _load(
    folder: Path, batch: Batch, tally: Tally | None, knows_model: Callable[[str], bool]
) -> tuple[Lines, Tally, BinaryIO | None]:
    """Reads the requests, and the results so far if there is no tally of them. Runs on a thread."""
    path = folder / batch.requests
    try:
        file = path.open("rb")
    except FileNotFoundError:
        gone = LineError("file_not_found", "The input file was deleted before the batch began.")
        return Lines(errors=[gone]), Tally(), None
    # A batch that was accepted is finished even if the server serves other models now.
    is_new = batch.in_progress_at is None and batch.style == "openai"
    knows = knows_model if is_new else lambda _: True
    lines = read_lines(path, batch.endpoint, knows)
    return lines, recovered_tally(folder, batch) if tally is None else tally, file
