"""ResponseStore: keeps responses for `previous_response_id` and GET, in SQLite: in memory, or in a file of --data-dir.

A response belongs to the API key of its request; for other keys it does not exist. The store is bounded in bytes and in
time, and evicts the least recently used response first. Using a response counts as a use of all responses before it in
the conversation. One thread does all the work, so nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from moeserve.errors import ConfigError
from moeserve.httpserver.transport.errors import ApiError, invalid

T = TypeVar("T")

FILE_NAME: Final = "responses.sqlite3"
RETENTION_S: Final = 30 * 86400.0  # since the last use; OpenAI's
PREVIOUS: Final = "previous_response_id"
MAX_MEMORY_BYTES: Final = 64 << 20
MAX_FILE_BYTES: Final = 1 << 30
# The most bytes of all responses of a conversation. A request body has the same limit.
MAX_CHAIN_BYTES: Final = 32 << 20

SERVER_ENDED: Final = {
    "code": "server_error",
    "message": "the server ended before this response did; send the request again",
}

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL,
    input BLOB NOT NULL, response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used);
CREATE TABLE IF NOT EXISTS item_places (
    item TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (item, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS item_places_by_response ON item_places (response);
CREATE TRIGGER IF NOT EXISTS item_places_end AFTER DELETE ON responses
    BEGIN DELETE FROM item_places WHERE response = old.id; END;
CREATE TABLE IF NOT EXISTS unfinished (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
# Upgrades the file of an older server, whose table had one row for each item id, whatever key it belonged to.
_UPGRADE: Final = """
BEGIN;
INSERT OR IGNORE INTO item_places SELECT id, response FROM items;
DROP TRIGGER IF EXISTS items_end;
DROP TABLE items;
COMMIT;
"""


@dataclass(frozen=True)
class Stored:
    """A stored response. input: the items that the client sent. response: the response object."""

    id: str
    owner: str  # the owner of the request's API key (`RequestState.key_owner`); "" without keys
    previous: str | None
    input: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore:
    def __init__(
        self, directory: Path | None, *, max_bytes: int | None = None, retention_s: float = RETENTION_S
    ) -> None:
        """Opens the store; `directory` None keeps it in memory. Raises ConfigError."""
        self._max_bytes = max_bytes or (MAX_MEMORY_BYTES if directory is None else MAX_FILE_BYTES)
        self._retention_s = retention_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._bytes = 0
        self._db = self._thread.submit(self._open, directory).result()

    async def begin(self, stored: Stored) -> None:
        """Stores a response that is not made yet; a `put` must follow. If the server ends before the `put`, the next
        server marks the response as failed. Raises ApiError 500."""
        await self._run(lambda: self._put(stored, is_finished=False))

    async def put(self, stored: Stored) -> None:
        """Stores a response, replaces the entry that `begin` stored, and evicts old responses if needed. Raises
        ApiError 500."""
        await self._run(lambda: self._put(stored))

    async def get(self, owner: str, response_id: str) -> Stored:
        """Returns a response. Raises ApiError 404."""
        return await self._run(lambda: self._get(owner, response_id))

    async def chain(self, owner: str, response_id: str) -> list[Stored]:
        """Returns the response and all earlier ones of its conversation, oldest first. Raises ApiError 400,
        previous_response_not_found, if one is missing."""
        return await self._run(lambda: self._chain(owner, response_id))

    async def items(self, owner: str, item_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Returns items of stored responses and of their inputs, in the order of their ids. Raises ApiError 404."""
        return await self._run(lambda: self._items(owner, item_ids))

    async def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response. Raises ApiError 404."""
        await self._run(lambda: self._delete(owner, response_id))

    def close(self) -> None:
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:  # e.g. the disk is full or broken
            raise ApiError(
                500,
                f"the store of responses failed: {error}; free disk space or mend --data-dir, and try again",
                code="storage_error",
            ) from error

    # ---- everything below runs on the thread

    def _open(self, directory: Path | None) -> sqlite3.Connection:
        try:
            if directory is None:
                db = sqlite3.connect(":memory:")
            else:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not os.access(directory, os.W_OK | os.X_OK):  # SQLite's error would not say so
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
                path = directory / FILE_NAME
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # prompts and answers are private
                db = sqlite3.connect(path, timeout=1.0)
                # The size would be wrong if a second server wrote to the file.
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(_SCHEMA)
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'items'").fetchone():
                db.executescript(_UPGRADE)
            _fail_unfinished(db)
            self._bytes = _size_of(db)
        except (OSError, sqlite3.Error) as error:
            reason = "" if isinstance(error, OSError) else " (is another server using it?)"
            if isinstance(error, PermissionError):
                reason = f" (as user {os.geteuid()})"
            raise ConfigError(f"--data-dir: {directory} cannot be used: {error}{reason}") from error
        return db

    def _put(self, stored: Stored, *, is_finished: bool = True) -> None:
        given, response = orjson.dumps(stored.input), orjson.dumps(stored.response)
        items = [item["id"] for item in [*stored.input, *stored.response.get("output", [])] if "id" in item]
        # An estimate of the rows and their indices.
        size = len(given) + len(response) + 200 + 200 * len(items)
        row = (stored.id, stored.owner, stored.previous, time.time(), size, given, response)
        try:
            with self._db:
                self._bytes -= self._size(stored.id)
                self._db.execute("DELETE FROM responses WHERE id = ?", (stored.id,))
                if is_finished:
                    self._db.execute("DELETE FROM unfinished WHERE id = ?", (stored.id,))
                else:
                    self._db.execute("INSERT INTO unfinished VALUES (?)", (stored.id,))
                self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                self._db.executemany(
                    "INSERT OR IGNORE INTO item_places VALUES (?, ?)", [(one, stored.id) for one in items]
                )
                self._bytes += size
                self._evict()
        except sqlite3.Error:  # the transaction was rolled back
            self._bytes = _size_of(self._db)
            raise

    def _evict(self) -> None:
        """Deletes the least recently used responses until the store is within its bounds."""
        expired = time.time() - self._retention_s
        while True:
            oldest = self._db.execute("SELECT id, used, size FROM responses ORDER BY used LIMIT 1").fetchone()
            if oldest is None or (oldest[1] >= expired and self._bytes <= self._max_bytes):
                return
            self._db.execute("DELETE FROM responses WHERE id = ?", (oldest[0],))
            self._bytes -= oldest[2]

    def _get(self, owner: str, response_id: str, param: str = "response_id") -> Stored:
        """Returns a response. `param`: the field of the request that named it, for the error."""
        row = self._db.execute(
            "SELECT previous, input, response FROM responses WHERE id = ? AND owner = ? AND used >= ?",
            (response_id, owner, time.time() - self._retention_s),
        ).fetchone()
        if row is None:
            why = "it was not stored, was deleted or has expired, or another model of this server made it"
            message = f"there is no stored response {response_id[:200]!r}: {why}"
            if param == PREVIOUS:  # with this status and code, clients send the whole conversation again
                raise ApiError(400, message, param=param, code="previous_response_not_found")
            raise ApiError(404, message, param=param, code="response_not_found")
        previous, given, response = row
        return Stored(response_id, owner, previous, orjson.loads(given), orjson.loads(response))

    def _chain(self, owner: str, response_id: str) -> list[Stored]:
        newest_first: list[Stored] = []
        following: str | None = response_id
        left = MAX_CHAIN_BYTES
        while following is not None:
            left -= self._size(following)
            if left < 0:
                message = f"builds on more than {MAX_CHAIN_BYTES} bytes of stored responses: send the last of them anew"
                raise invalid("previous_response_id", message)
            newest_first.append(self._get(owner, following, PREVIOUS))
            following = newest_first[-1].previous
        now = time.time()
        with self._db:
            for stored in newest_first:
                self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (now, stored.id))
        return newest_first[::-1]

    def _items(self, owner: str, item_ids: Sequence[str]) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        left = MAX_CHAIN_BYTES
        for item_id in item_ids:
            if item_id in found:
                continue
            place = self._place(owner, item_id)
            if place is not None:
                left -= self._size(place)
                if left < 0:
                    raise invalid("input", f"refers to more than {MAX_CHAIN_BYTES} bytes of stored responses")
                with suppress(ApiError):  # it may have expired
                    stored = self._get(owner, place)
                    items = [*stored.input, *stored.response["output"]]
                    found |= {item["id"]: item for item in items if "id" in item}
            if item_id not in found:
                message = f"input: there is no stored item {item_id[:200]!r}"
                raise ApiError(404, message, param="input", code="item_not_found")
        return [found[item_id] for item_id in item_ids]

    def _place(self, owner: str, item_id: str) -> str | None:
        """Returns the id of this owner's latest response with this item; None if there is none. Several responses may
        have an item with this id, because clients send items again and choose ids."""
        row = self._db.execute(
            "SELECT id FROM item_places JOIN responses ON id = item_places.response WHERE item = ? AND owner = ? "
            "ORDER BY used DESC LIMIT 1",
            (item_id, owner),
        ).fetchone()
        return None if row is None else str(row[0])

    def _size(self, response_id: str) -> int:
        """Returns the bytes of a response; 0 for an unknown one."""
        row = self._db.execute("SELECT size FROM responses WHERE id = ?", (response_id,)).fetchone()
        return 0 if row is None else int(row[0])

    def _delete(self, owner: str, response_id: str) -> None:
        self._get(owner, response_id)
        with self._db:
            (size,) = self._db.execute(
                "DELETE FROM responses WHERE id = ? RETURNING size", (response_id,)
            ).fetchone()
            self._bytes -= size


def _size_of(db: sqlite3.Connection) -> int:
    size: int = db.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]
    return size


def _fail_unfinished(db: sqlite3.Connection) -> None:
    """Marks the responses that an earlier server left unfinished as failed."""
    with db:
        rows = db.execute(
            "SELECT id, response FROM responses WHERE id IN (SELECT id FROM unfinished)"
        ).fetchall()
        for response_id, response in rows:
            failed = orjson.loads(response) | {"status": "failed", "error": SERVER_ENDED}
            db.execute("UPDATE responses SET response = ? WHERE id = ?", (orjson.dumps(failed), response_id))
        db.execute("DELETE FROM unfinished")
