"""The disk tier's files: what is read is what was written, or nothing, whatever happened to the files."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moeserve.cli.main import main
from moeserve.errors import ConfigError
from moeserve.kv.disk.directory import DiskDirectory
from moeserve.kv.disk.segment import HEADER_BYTES, MAGIC
from moeserve.kv.disk.store import PageStore
from tests.support.router.disk_pages import FINGERPRINT, PAGE_BYTES, key, open_store, page, write


def read(store: PageStore, number: int) -> bytes | None:
    """What the store has of a page; None: nothing."""
    into = memoryview(bytearray(PAGE_BYTES))
    return bytes(into) if store.read(key(number), into) else None


def filled(folder: Path, count: int, budget: int = 1 << 20) -> PageStore:
    store = open_store(folder, budget)
    for number in range(count):
        write(store, number)
    return store


def test_pages_outlive_the_process(tmp_path: Path) -> None:
    filled(tmp_path, 20)
    store = open_store(tmp_path)
    assert sorted(store.keys()) == [key(number) for number in range(20)]
    assert all(read(store, number) == page(number) for number in range(20))
    assert read(store, 20) is None
    write(store, 20)
    assert read(open_store(tmp_path), 20) == page(20)


def test_files_are_private(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path / "new")
    filled(directory.path, 3)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.path.iterdir()}
    assert modes == {"lock": 0o600, "segment-00000001.kv": 0o600, "segment-00000001.idx": 0o600}
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    first = DiskDirectory(tmp_path)
    with pytest.raises(ConfigError, match="another server uses this folder"):
        DiskDirectory(tmp_path)
    assert first.path == tmp_path


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="holds other files"):
        DiskDirectory(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"model_hash": "11"}, {"kv_dtype": "q8_0"}, {"architecture": "x"}, {"engine": "x"}], ids=str
)
def test_pages_of_another_fingerprint_are_not_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    filled(tmp_path, 5)
    store = open_store(tmp_path, **changes)
    assert store.keys() == []
    assert read(store, 1) is None
    assert len(open_store(tmp_path)) == 5
    assert len(open_store(tmp_path, model="renamed.gguf")) == 5


def test_the_budget_holds_and_the_least_recently_used_go(tmp_path: Path) -> None:
    budget = 256 << 10
    store = filled(tmp_path, 100, budget)
    for number in range(100, 2000):
        gone = write(store, number)
        assert key(3) not in gone
        assert read(store, 3) == page(3), "it is used all the time"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget
    assert budget // PAGE_BYTES // 2 < len(store) < budget // PAGE_BYTES
    assert read(store, 1999) == page(1999)
    assert sorted(open_store(tmp_path, budget).keys()) == sorted(store.keys())


def test_pages_of_two_sizes_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    """KV and recurrent states: each page is whole, and what was not used for longest goes, of either."""
    kinds = [FINGERPRINT, replace(FINGERPRINT, page_tokens=0, page_bytes=4 * PAGE_BYTES)]
    states = {number: page(number) * 4 for number in range(1000, 1040)}
    store = PageStore(tmp_path, 128 << 10, kinds)
    gone: list[bytes] = []
    for number, state in states.items():
        gone += store.write(key(number), memoryview(state))
        gone += write(store, number - 1000)
    assert gone
    for again in (store, PageStore(tmp_path, 128 << 10, kinds)):
        assert sorted(again.keys()) == sorted({key(n) for n in (*states, *range(40))} - set(gone))
        into = memoryview(bytearray(4 * PAGE_BYTES))
        for number, state in states.items():
            assert again.read(key(number), into) == (key(number) not in gone)
            assert key(number) in gone or into == state
            assert read(again, number - 1000) == (None if key(number - 1000) in gone else page(number - 1000))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 128 << 10


def test_foreign_segments_go_first(tmp_path: Path) -> None:
    filled(tmp_path, 600)
    store = open_store(tmp_path, 340_000, model_hash="another")
    for number in range(20):
        assert write(store, number) == []
    assert all(read(store, number) == page(number) for number in range(20))
    assert len(open_store(tmp_path)) < 600


def test_a_smaller_budget_is_kept_from_the_first_write_on(tmp_path: Path) -> None:
    filled(tmp_path, 200)
    store = open_store(tmp_path, 30_000)
    gone = write(store, 1000)
    assert len(gone) == 200
    assert read(store, 1000) == page(1000)


def test_a_deleted_folder_raises_and_what_is_open_is_still_read(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    store = filled(folder, 5)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        write(store, 5)
    assert read(store, 4) == page(4)
    folder.mkdir()
    write(store, 5)
    assert read(open_store(folder), 5) == page(5)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut anywhere, or with a bit flipped."""
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        return data[:at]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def test_a_thousand_cuts_and_bit_flips(tmp_path: Path) -> None:
    """A damaged page is not there; never is there a wrong one. What was not damaged is still read."""
    rng = random.Random(1)
    for segment in range(3):
        store = open_store(tmp_path)
        for number in range(8):
            write(store, segment * 8 + number)
    files = sorted(tmp_path.glob("segment-*"))
    lost = 0
    for _ in range(1000):
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(damaged(rng, whole))
        store = open_store(tmp_path)
        found = [read(store, number) for number in range(24)]
        assert all(data in (None, page(number)) for number, data in enumerate(found))
        assert found.count(None) <= 8, "of one segment"
        lost += found.count(None) > 0
        path.write_bytes(whole)
    assert lost > 500  # of half of a segment's header nothing depends


def test_a_crash_at_any_byte(tmp_path: Path) -> None:
    """What was written before is read after; what was being written is not there, or whole."""
    whole = tmp_path / "whole"
    whole.mkdir()
    filled(whole, 3)
    (pages,), (index,) = whole.glob("*.kv"), whole.glob("*.idx")
    records = index.read_bytes()
    cuts = [
        (HEADER_BYTES + 2 * PAGE_BYTES + at, len(records) // 3 * 2) for at in range(0, PAGE_BYTES + 1, 16)
    ]
    cuts += [
        (HEADER_BYTES + 3 * PAGE_BYTES, len(records) // 3 * 2 + at) for at in range(len(records) // 3 + 1)
    ]
    for page_end, record_end in cuts:
        folder = tmp_path / "crashed"
        shutil.copytree(whole, folder)
        os.truncate(folder / pages.name, page_end)
        os.truncate(folder / index.name, record_end)
        store = open_store(folder)
        assert [read(store, 0), read(store, 1)] == [page(0), page(1)]
        assert read(store, 2) == (page(2) if record_end == len(records) else None)
        write(store, 2)
        assert read(open_store(folder), 2) == page(2)
        shutil.rmtree(folder)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_a_file(path: Path) -> None:
    """Whose owner may be another."""
    other = path.with_name("other")
    other.write_bytes(b"somebody's")
    path.symlink_to(other)


ODD = [make_folder, make_fifo, make_socket, link_to_zeros, link_to_a_file]


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", ["segment-00000001.kv", "segment-00000001.idx", "segment-00000077.kv"])
def test_what_is_no_regular_file_is_left_alone(
    make: Callable[[Path], None],
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder ended the start, a FIFO hung it, and /dev/zero has no end."""
    DiskDirectory(tmp_path)
    filled(tmp_path, 3)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    store = open_store(tmp_path, 20 * PAGE_BYTES)
    assert f"the disk tier leaves {tmp_path / name}: it is not a regular file" in caplog.text
    for number in range(10, 40):  # and so what may go has to
        write(store, number)
    assert read(store, 39) == page(39)
    for command in ("list", "verify"):
        assert main(["cache", command, str(tmp_path)]) == 0
        assert f"{tmp_path / name}: it is not a regular file; it is left alone" in capsys.readouterr().out
    assert main(["cache", "prune", str(tmp_path), "0"]) == 0
    assert os.path.lexists(tmp_path / name)
    assert read(open_store(tmp_path), 39) is None
    if make is link_to_a_file:
        assert (tmp_path / "other").read_bytes() == b"somebody's"


@pytest.mark.parametrize("make", ODD[1:])
def test_a_folder_that_is_none_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "cache")
    with pytest.raises(ConfigError, match="it is not a folder; name an empty one, or a new one"):
        DiskDirectory(tmp_path / "cache")


def test_a_lock_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "lock").symlink_to(tmp_path / "made-by-us")
    with pytest.raises(ConfigError):
        DiskDirectory(folder)
    assert not (tmp_path / "made-by-us").exists()


def header_of(text: bytes) -> bytes:
    return (struct.pack("<8sII", MAGIC, len(text), zlib.crc32(text)) + text).ljust(HEADER_BYTES, b"\n")


FIELDS = json.dumps(asdict(FINGERPRINT))


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "{}", '"x"', "{"),
        FIELDS.replace(str(PAGE_BYTES), "0"),
        FIELDS.replace(str(PAGE_BYTES), "-1"),
        FIELDS.replace(str(PAGE_BYTES), "[]"),
        FIELDS.replace('"00ff"', "1"),
    ],
)
def test_a_header_whose_checksum_fits_is_not_trusted(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    DiskDirectory(tmp_path)
    path = tmp_path / "segment-00000001.kv"
    path.write_bytes(header_of(text.encode()) + bytes(PAGE_BYTES))
    path.with_suffix(".idx").write_bytes(bytes(40))
    store = open_store(tmp_path)
    assert "its header" in caplog.text
    write(store, 1)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert "its header" in capsys.readouterr().out


def test_an_index_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    index = tmp_path / "segment-00000001.idx"
    os.truncate(index, 1 << 40)  # sparse
    store = open_store(tmp_path, 1 << 62)
    assert [read(store, number) for number in range(3)] == [page(number) for number in range(3)]


def test_what_may_not_be_read_goes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path, 3)
    with patch("moeserve.kv.disk.store.read_header", side_effect=PermissionError(13, "Permission denied")):
        store = open_store(tmp_path, 4 * PAGE_BYTES)
    assert "the disk tier ignores [Errno 13] Permission denied" in caplog.text
    write(store, 5)
    assert not (tmp_path / "segment-00000001.kv").exists()
