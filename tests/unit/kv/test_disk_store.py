"""The disk tier's files: what is read is what was written, or nothing, whatever happened to the files."""

from __future__ import annotations

import os
import random
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.errors import ConfigError
from moeserve.kv.disk.directory import DiskDirectory
from moeserve.kv.disk.segment import HEADER_BYTES
from moeserve.kv.disk.store import PageStore
from tests.support.disk_pages import FINGERPRINT, PAGE_BYTES, key, open_store, page, write


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
