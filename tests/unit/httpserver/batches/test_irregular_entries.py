"""Entries of --batch-dir that are no regular files: opening one could block, never end, or lead out of the folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moeserve.errors import ConfigError
from moeserve.httpserver.batches.records import new_id
from moeserve.httpserver.batches.store import BatchStore

MOST_BYTES = 1 << 20


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)  # its name alone is short enough
        listening.bind(path.name)


KINDS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(__file__),
    "lost link": lambda path: path.symlink_to(path.with_name("nothing")),
    "socket": unix_socket,
}
NAMES = {
    "a file's record": f"files/{new_id('file-')}.json",
    "a file": f"files/{new_id('file-')}.data",
    "a batch's record": f"batches/{new_id('batch_')}.json",
    "a draft": f"batches/{new_id('batch_')}.draft",
    "results": f"batches/{new_id('msgbatch_')}.output",
    "an upload": f"uploads/{new_id('file-')}",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_entry_that_is_no_regular_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store = BatchStore(tmp_path, MOST_BYTES)
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name} is no regular file; move it away"):
        store.open()
    store.close()
    (tmp_path / name).rmdir() if make is Path.mkdir else (tmp_path / name).unlink()
    store = BatchStore(tmp_path, MOST_BYTES)
    assert store.open()
    store.close()


def test_entries_with_other_names_stay(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, MOST_BYTES)
    others = [tmp_path / part / "of somebody" for part in ("files", "batches", "uploads")]
    for other in others:
        other.mkdir()
    os.mkfifo(tmp_path / "files" / "fifo.json")
    assert store.open()
    assert all(other.is_dir() for other in others)
    store.close()


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, KINDS["device"]], ids=["FIFO", "file", "device"])
def test_what_is_no_folder_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "batches"
    make(path)
    with pytest.raises(ConfigError, match="is no folder; name an empty one, or a new one"):
        BatchStore(path, MOST_BYTES)


def test_the_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    folder = tmp_path / "batches"
    folder.mkdir()
    (folder / "lock").symlink_to(outside)
    with pytest.raises(ConfigError, match="cannot be used"):
        BatchStore(folder, MOST_BYTES)
    assert not outside.exists()
