"""BatchStore: the files and batches of a batch folder, by owner. Other API keys do not see them.

Everything runs on the event loop, except disk access, which runs on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from moeserve.httpserver.batches.folder import BatchFolder
from moeserve.httpserver.batches.journal import recover
from moeserve.httpserver.batches.outcomes import Tally
from moeserve.httpserver.batches.records import Batch, StoredFile
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.messages.refusal import Refusal

T = TypeVar("T")
P = TypeVar("P", StoredFile, Batch)

MAX_FILE_BYTES: Final = 200 << 20  # OpenAI's
MAX_FILES_PER_OWNER: Final = 1000
MAX_OPEN_BATCHES_PER_OWNER: Final = 32
RETENTION_S: Final = 30 * 86400  # how long ended batches and their results are kept


class BatchStore:
    def __init__(self, path: Path, max_bytes: int) -> None:
        """max_bytes: the most bytes of all files together. Raises ConfigError."""
        self.folder = BatchFolder(path)
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, Batch] = {}
        self.tallies: dict[str, Tally] = {}  # for batches that have not ended, by id
        self.is_open = False
        self.changed: Callable[[], None] = lambda: None  # set by the runner: tells it that there is work
        self._max_bytes = max_bytes
        self._bytes = Counter[str]()  # by owner
        self._saving = asyncio.Lock()  # a record is written by one thread at a time

    def open(self) -> bool:
        """Locks and reads the folder. Returns False if another server uses it. Raises ConfigError, OSError."""
        if not self.folder.lock():
            return False
        self.folder.require_regular()
        self.folder.clear_uploads()
        self.files = {file.id: file for file in self.folder.read("files", StoredFile)}
        self.batches = {batch.id: batch for batch in self.folder.read("batches", Batch)}
        for file in self.files.values():
            self._bytes[file.owner] += file.bytes
        for batch in self.batches.values():
            self._bytes[batch.owner] += self._bytes_of(batch)
            # The batch goes on only when the model is loaded; its counts are shown before.
            if not batch.is_ended:
                with contextlib.suppress(
                    OSError
                ):  # the batch waits for the folder then, which its start logs
                    self.tallies[batch.id] = recovered_tally(self.folder.path, batch)
        self.is_open = True
        return True

    def close(self) -> None:
        """Releases the folder for another server. May be called twice."""
        self.is_open = False
        self.folder.close()

    def require_open(self) -> None:
        """Raises ApiError 503 if the folder is not open."""
        if not self.is_open:
            message = "the batch folder is in use by another server, which is ending; try again in a moment"
            raise ApiError(503, message, code="unavailable")

    # ---- files

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Returns an owner's file. Raises ApiError 404."""
        self.require_open()
        file = self.files.get(file_id)
        if file is None or file.owner != owner or _has_expired(file.expires_at):
            message = f"there is no file {file_id[:200]!r}: it was deleted, has expired, or never was"
            raise ApiError(404, message, param="file_id", code="file_not_found")
        return file

    def files_of(self, owner: str, purpose: str | None) -> list[StoredFile]:
        """Returns an owner's files, oldest first."""
        self.require_open()
        mine = (file for file in self.files.values() if file.owner == owner)
        return sorted(
            (file for file in mine if purpose in (None, file.purpose) and not _has_expired(file.expires_at)),
            key=_by_age,
        )

    def room(self, owner: str) -> int:
        """Returns the bytes that an owner may still store. With n owners, each may use 1 / (n + 1) of the folder, so
        that there is always room for one more owner."""
        self.require_open()
        owners = {name for name, size in self._bytes.items() if size} | {owner}
        share = self._max_bytes // (len(owners) + 1) if owner else self._max_bytes
        return max(min(share - self._bytes[owner], self._max_bytes - self._bytes.total()), 0)

    def no_room(self) -> ApiError:
        message = "the files and batches of this API key take all the room that --batch-dir-gib leaves it: delete some"
        return ApiError(413, message, code="storage_full", refusal=Refusal.QUOTA)

    async def add_file(self, file: StoredFile, upload: str | None = None) -> None:
        """Stores a file's record. upload: the name of the uploaded bytes, which are moved to the file's place; None:
        the bytes are at the file's place already. Raises ApiError with status 413 if the owner has too many files, 500
        if the folder cannot be written."""
        if upload is not None:
            if len(self.files_of(file.owner, None)) >= MAX_FILES_PER_OWNER:
                message = f"this API key has {MAX_FILES_PER_OWNER} files, the most: delete some"
                raise ApiError(413, message, code="too_many_files", refusal=Refusal.QUOTA)
            await self.on_disk(self.folder.keep_upload, upload, file.data)
        await self.on_disk(self.folder.write, "files", file)
        if file.id not in self.files:
            self._bytes[file.owner] += file.bytes
        self.files[file.id] = file

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Deletes an owner's file. Raises ApiError: 404, or 409 while a batch needs it."""
        file = self.file(owner, file_id)
        for batch in self.batches.values():
            if batch.input_file_id == file_id and not batch.is_ended:
                message = f"{file_id} is the input of {batch.id}, which has not ended: cancel that first"
                raise ApiError(409, message, code="file_in_use")
        await self._drop_file(file)

    async def _drop_file(self, file: StoredFile) -> None:
        await self.on_disk(self.folder.remove, f"files/{file.id}.json", file.data)
        del self.files[file.id]
        self._forget_bytes(file.owner, file.bytes)

    # ---- batches

    def batch(self, owner: str, batch_id: str, style: str) -> Batch:
        """Returns an owner's batch. style: the API through which it was created. Raises ApiError 404."""
        self.require_open()
        batch = self.batches.get(batch_id)
        if batch is None or batch.owner != owner or batch.style != style:
            message = f"there is no batch {batch_id[:200]!r}"
            raise ApiError(404, message, param="batch_id", code="batch_not_found")
        return batch

    def batches_of(self, owner: str, style: str) -> list[Batch]:
        """Returns an owner's batches, oldest first."""
        self.require_open()
        mine = (batch for batch in self.batches.values() if batch.owner == owner and batch.style == style)
        return sorted(mine, key=_by_age)

    def counts(self, batch: Batch) -> Mapping[str, int]:
        """Returns the number of a batch's requests that have ended, by `outcomes.Kind`."""
        tally = self.tallies.get(batch.id)
        return batch.counts if tally is None else tally.kinds

    def check_room_for_batch(self, owner: str) -> None:
        """Raises ApiError 429 if the owner has too many batches."""
        mine = sum(batch.owner == owner and not batch.is_ended for batch in self.batches.values())
        if mine >= MAX_OPEN_BATCHES_PER_OWNER:
            message = f"{mine} batches of this API key have not ended, the most at once: wait, or cancel some"
            raise ApiError(429, message, code="too_many_batches", refusal=Refusal.QUOTA)

    async def save(self, batch: Batch) -> None:
        """Writes a batch's state to disk. Raises ApiError 500."""
        await asyncio.shield(asyncio.create_task(self._write(batch)))
        if batch.id not in self.batches:
            self._bytes[batch.owner] += self._bytes_of(batch)
        self.batches[batch.id] = batch

    async def _write(self, batch: Batch) -> None:
        async with self._saving:
            await self.on_disk(self.folder.write, "batches", batch)

    async def delete_batch(self, batch: Batch) -> None:
        """Deletes an ended message batch, with its requests and results. Raises ApiError with status 400 if it has not
        ended, 500 if the folder cannot be written."""
        if not batch.is_ended:
            raise invalid("batch_id", f"{batch.id} has not ended: cancel it first")
        size = self._bytes_of(batch)
        names = [f"batches/{batch.id}.json"]
        if batch.style == "anthropic":
            names += [batch.output, batch.requests]
        await self.on_disk(self.folder.remove, *names)
        del self.batches[batch.id]
        self._forget_bytes(batch.owner, size)

    def grew(self, batch: Batch, size: int) -> None:
        """Notes that a batch's journals grew by `size` bytes."""
        if batch.style == "anthropic":
            self._bytes[batch.owner] += size

    async def sweep(self) -> None:
        """Deletes expired files and batches."""
        for file in [file for file in self.files.values() if _has_expired(file.expires_at)]:
            await self._drop_file(file)
        for batch in [batch for batch in self.batches.values() if batch.is_ended]:
            if _has_expired((batch.ended_at or batch.created_at) + RETENTION_S):
                await self.delete_batch(batch)

    async def on_disk(self, work: Callable[..., T], *args: object) -> T:
        """Runs `work` on a thread. Raises ApiError 500."""
        try:
            return await asyncio.to_thread(work, *args)
        except OSError as error:  # the disk is full, or broken
            raise ApiError(
                500,
                f"the batch folder failed: {error}; free disk space or mend --batch-dir, and try again",
                code="storage_error",
            ) from error

    def _bytes_of(self, batch: Batch) -> int:
        """Returns the bytes of a batch's requests and journals, except files that the owner uploaded."""
        if batch.style == "openai":
            return 0
        return self.folder.size(batch.requests) + self.folder.size(batch.output)

    def _forget_bytes(self, owner: str, size: int) -> None:
        self._bytes[owner] -= size
        if self._bytes[owner] <= 0:
            del self._bytes[owner]


def recovered_tally(folder: Path, batch: Batch) -> Tally:
    """Reads a batch's results so far, and cuts off an incomplete last line. Raises OSError."""
    tally = Tally()
    for name in (batch.output, batch.error_output):
        recover(folder / name, tally.take)
    return tally


def page(
    found: Iterable[P], after: str | None, limit: int, *, newest_first: bool = True
) -> tuple[list[P], bool]:
    """Returns at most `limit` records after the one with the id `after`, and whether there are more. Raises ApiError
    400."""
    records = list(found)[:: -1 if newest_first else 1]
    if after is not None:
        ids = [record.id for record in records]
        if after not in ids:
            raise invalid("after", f"there is no {after[:200]!r}; give the last id of the page before")
        records = records[ids.index(after) + 1 :]
    return records[:limit], len(records) > limit


def _by_age(record: StoredFile | Batch) -> tuple[int, str]:
    return record.created_at, record.id


def _has_expired(at: int | None) -> bool:
    return at is not None and time.time() >= at
