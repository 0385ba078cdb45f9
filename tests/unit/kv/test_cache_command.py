"""`moeserve cache`: list, verify and prune the folder of --kv-disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.cli.main import main
from moeserve.kv.disk.directory import DiskDirectory
from tests.support.router.disk_pages import FINGERPRINT, PAGE_BYTES, open_store, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two segments of one model and one of another; no server uses it any more."""
    DiskDirectory(tmp_path)
    for first in (0, 10):
        store = open_store(tmp_path)
        for number in range(first, first + 10):
            write(store, number)
    write(open_store(tmp_path, model="other.gguf", model_hash="11"), 0)
    return tmp_path


def test_list_names_models_and_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:1] == ["model.gguf"]
    assert f" {20 * FINGERPRINT.page_tokens} " in lines[1]
    assert lines[2].split()[:1] == ["other.gguf"]


def test_verify_finds_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(folder)]) == 0
    assert "21 pages, 0 damaged" in capsys.readouterr().out
    path = folder / "segment-00000002.kv"
    data = bytearray(path.read_bytes())
    data[-PAGE_BYTES // 2] ^= 4
    path.write_bytes(data)
    assert main(["cache", "verify", str(folder)]) == 1
    assert "segment-00000002.kv: 1 pages are damaged" in capsys.readouterr().out


def test_verify_finds_a_damaged_header(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "segment-00000001.kv").write_bytes(b"")
    assert main(["cache", "verify", str(folder)]) == 1
    assert "its header is cut off" in capsys.readouterr().out


def test_prune_keeps_what_was_used_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", str(folder), "1"]) == 0
    assert len(list(folder.glob("segment-*"))) == 6
    assert main(["cache", "prune", str(folder), str(6000 / 2**30)]) == 0
    assert [path.name for path in sorted(folder.glob("segment-*"))] == [
        "segment-00000003.idx",
        "segment-00000003.kv",
    ]
    assert main(["cache", "prune", str(folder), "0"]) == 0
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert "deleted" in capsys.readouterr().out


@pytest.mark.parametrize("gib", ["nan", "-1", "few"])
def test_prune_deletes_nothing_for_a_size_that_is_none(
    folder: Path, gib: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cache", "prune", str(folder), gib])
    assert ended.value.code == 2
    assert f"GIB: must be a number of 0 or more, not {gib!r}" in capsys.readouterr().err
    assert len(list(folder.glob("segment-*"))) == 6


def test_prune_leaves_a_folder_that_a_server_uses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = DiskDirectory(folder)
    assert main(["cache", "prune", str(folder), "0"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("moeserve cache: ")
    assert "another server uses this folder" in printed.err
    assert printed.out == ""
    assert len(list(server.path.glob("segment-*"))) == 6


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("")
    assert main(["cache", "prune", str(tmp_path), "0"]) == 2
    refused = f"moeserve cache: {tmp_path}: no folder that a server has used as --kv-disk\n"
    assert capsys.readouterr() == ("", refused)
    assert (tmp_path / "thesis.txt").exists()
