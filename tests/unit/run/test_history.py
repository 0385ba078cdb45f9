"""The history of questions: its file, and what goes wrong with it."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from moeserve.cli.run.history import FILE, MOST_ENTRIES, MOST_ENTRY_CHARS, History, history_path


def test_entries_come_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE
    first = History(path)
    for entry in ("one", "two\nlines", "日本語 \x1b[31m"):
        first.add(entry)
    assert History(path).entries() == ["one", "two\nlines", "日本語 \x1b[31m"]


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "moeserve" / FILE
    umask = os.umask(0)
    try:
        History(path).add("secret")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.chmod(0o644)
        History(path).add("another")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/mia")
    assert history_path({"XDG_STATE_HOME": "/state"}) == Path("/state/moeserve") / FILE
    own = Path("/home/mia/.local/state/moeserve") / FILE
    assert history_path({}) == history_path({"XDG_STATE_HOME": ""}) == own
    assert history_path({"XDG_STATE_HOME": "relative"}) == own


@pytest.mark.parametrize("in_the_way", ["file", "folder", "link"])
def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, in_the_way: str) -> None:
    """ollama/ollama#10471: the chat did not start."""
    path = tmp_path / "moeserve" / FILE
    if in_the_way == "file":
        path.parent.write_text("")
    elif in_the_way == "folder":
        path.mkdir(parents=True)
    else:
        path.parent.mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    history = History(path)
    assert history.entries() == []
    assert history.problem.startswith(f"no history is kept: {path}: ")
    history.problem = ""
    history.add("x")
    assert history.problem == ""
    assert not (tmp_path / "elsewhere").exists()


def test_it_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text("".join(f'"{i}"\n' for i in range(2 * MOST_ENTRIES + 1)))
    newest = [str(i) for i in range(MOST_ENTRIES + 1, 2 * MOST_ENTRIES + 1)]
    assert History(path).entries() == newest
    assert len(path.read_text().splitlines()) == MOST_ENTRIES
    History(path).add("x" * (MOST_ENTRY_CHARS + 1))
    assert History(path).entries() == newest


def test_lines_that_were_cut_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b'"whole"\n"cut\n{"another": 1}\n\xff\xfe\n"last"\n')
    assert History(path).entries() == ["whole", "last"]


def _add(path: Path, name: str) -> None:
    history = History(path)
    for i in range(50):
        history.add(f"{name}{i}")


def test_chats_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    chats = [context.Process(target=_add, args=(tmp_path / FILE, name)) for name in "ab"]
    for chat in chats:
        chat.start()
    for chat in chats:
        chat.join()
    found = History(tmp_path / FILE).entries()
    assert sorted(found) == sorted(f"{name}{i}" for name in "ab" for i in range(50))
    assert [entry for entry in found if entry[0] == "a"] == [f"a{i}" for i in range(50)]
