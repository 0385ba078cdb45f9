"""The store of responses: bounds, retention, chains, and a file that outlives the server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeserve.errors import ConfigError
from moeserve.httpserver.responses import store as responses_store
from moeserve.httpserver.responses.store import FILE_NAME, ResponseStore, Stored
from moeserve.httpserver.transport.errors import ApiError

OWNER = "key-1"


def stored(name: str, previous: str | None = None, size: int = 100) -> Stored:
    return Stored(name, OWNER, previous, [{"text": "x" * size}], {"id": name})


def put(store: ResponseStore, *responses: Stored) -> None:
    for response in responses:
        asyncio.run(store.put(response))


def names(store: ResponseStore, of: str) -> list[str]:
    return [one.id for one in asyncio.run(store.chain(OWNER, of))]


def is_there(store: ResponseStore, name: str) -> bool:
    try:
        asyncio.run(store.get(OWNER, name))
    except ApiError:
        return False
    return True


@pytest.fixture
def store() -> Iterator[ResponseStore]:
    made = ResponseStore(None, max_bytes=10_000)
    yield made
    made.close()


def test_a_response_comes_back_as_it_was(store: ResponseStore) -> None:
    put(store, stored("a"), stored("b", "a"))
    assert asyncio.run(store.get(OWNER, "b")) == stored("b", "a")
    assert names(store, "b") == ["a", "b"]
    asyncio.run(store.delete(OWNER, "a"))
    assert not is_there(store, "a")
    for call in (store.chain(OWNER, "b"), store.delete(OWNER, "a"), store.get(OWNER, "c")):
        with pytest.raises(ApiError, match="no stored response"):
            asyncio.run(call)


def test_what_a_response_builds_on_has_a_bound(monkeypatch: pytest.MonkeyPatch, store: ResponseStore) -> None:
    monkeypatch.setattr(responses_store, "MAX_CHAIN_BYTES", 1500)
    put(store, *(stored(str(i), str(i - 1) if i else None, 300) for i in range(4)))
    assert names(store, "1") == ["0", "1"]
    with pytest.raises(ApiError, match="builds on more than 1500 bytes"):
        names(store, "3")


def test_a_response_is_its_owners(store: ResponseStore) -> None:
    put(store, stored("a"))
    for call in (store.get("key-2", "a"), store.chain("", "a"), store.delete("key-2", "a")):
        with pytest.raises(ApiError, match="no stored response"):
            asyncio.run(call)
    assert is_there(store, "a")


def with_item(name: str, item: str, text: str, owner: str = OWNER) -> Stored:
    return Stored(name, owner, None, [{"id": item, "text": text}], {"id": name, "output": []})


def texts_of(store: ResponseStore, item: str, owner: str = OWNER) -> list[str]:
    return [found["text"] for found in asyncio.run(store.items(owner, [item]))]


def test_an_item_is_there_as_long_as_a_response_with_it(store: ResponseStore) -> None:
    """Clients send the items of before again."""
    put(store, with_item("a", "msg_1", "first"), with_item("b", "msg_1", "again"))
    assert texts_of(store, "msg_1") == ["again"]
    asyncio.run(store.delete(OWNER, "b"))
    assert texts_of(store, "msg_1") == ["first"]
    asyncio.run(store.delete(OWNER, "a"))
    with pytest.raises(ApiError, match="no stored item 'msg_1'"):
        texts_of(store, "msg_1")


def test_another_keys_item_of_the_same_id_is_another(store: ResponseStore) -> None:
    """A client may choose the ids of what it sends."""
    put(store, with_item("a", "msg_1", "mine"), with_item("b", "msg_1", "another's", owner="key-2"))
    assert texts_of(store, "msg_1") == ["mine"]
    assert texts_of(store, "msg_1", "key-2") == ["another's"]
    with pytest.raises(ApiError, match="no stored item"):
        texts_of(store, "msg_1", "key-3")


def test_a_file_with_one_place_for_an_item_is_read(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    put(store, with_item("a", "msg_1", "mine"))
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:  # as version 0.1.0 wrote it
        db.executescript("""
            DROP TRIGGER item_places_end; DROP TABLE item_places;
            CREATE TABLE items (id TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID;
            CREATE INDEX items_by_response ON items (response);
            CREATE TRIGGER items_end AFTER DELETE ON responses
                BEGIN DELETE FROM items WHERE response = old.id; END;
            INSERT INTO items VALUES ('msg_1', 'a');
        """)
    for _ in range(2):
        again = ResponseStore(tmp_path)
        assert texts_of(again, "msg_1") == ["mine"]
        again.close()


def test_what_was_used_longest_ago_goes_first(store: ResponseStore) -> None:
    """And a chain stays together."""
    put(store, stored("a", size=2000), stored("b", "a", size=2000), stored("c", size=2000))
    assert names(store, "b") == ["a", "b"]  # used
    put(store, stored("d", size=2000), stored("e", size=2000))
    assert [is_there(store, name) for name in "abcde"] == [True, True, False, True, True]
    put(store, stored("huge", size=20_000))
    assert not any(is_there(store, name) for name in ("a", "b", "d", "e", "huge"))
    put(store, stored("f", size=9000))
    assert is_there(store, "f")  # the count of bytes is right again


def test_responses_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr(responses_store, "time", SimpleNamespace(time=lambda: now))
    store = ResponseStore(None, retention_s=60.0)
    put(store, stored("a"))
    now += 59.0
    assert is_there(store, "a")
    now += 2.0
    assert not is_there(store, "a")
    put(store, stored("b"))
    assert store._bytes < 2 * 500
    store.close()


def test_a_file_outlives_the_server_and_is_private(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "data"
    store = ResponseStore(directory)
    put(store, stored("a"), stored("b", "a"))
    with pytest.raises(ConfigError, match="another server"):
        ResponseStore(directory)
    store.close()
    again = ResponseStore(directory)
    assert names(again, "b") == ["a", "b"]
    assert again._bytes == store._bytes
    again.close()
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 100)
    (tmp_path / "file").write_text("")
    for place, hint in (
        (tmp_path, "is another server using it?"),
        (tmp_path / "file", "File exists"),
    ):
        with pytest.raises(ConfigError, match=re.escape(str(place)) + ".*" + re.escape(hint)):
            ResponseStore(place)


def test_a_folder_that_may_not_be_written_to_is_no_other_servers(tmp_path: Path) -> None:
    """With a database that is there already, which SQLite reports as read-only."""
    ResponseStore(tmp_path).close()
    program = f"""
import os
from pathlib import Path
from moeserve.errors import ConfigError
from moeserve.httpserver.responses.store import ResponseStore
os.geteuid() or os.setuid(65534)
try:
    ResponseStore(Path({str(tmp_path)!r}))
except ConfigError as error:
    print(error)
"""
    (tmp_path / FILE_NAME).chmod(0o666)
    tmp_path.chmod(0o555)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    finally:
        tmp_path.chmod(0o700)
    assert "Permission denied" in done.stdout, done.stderr
    assert "(as user " in done.stdout
    assert "another server" not in done.stdout
