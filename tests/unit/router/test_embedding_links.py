"""Files of embeddings between processes: each removes its own names, and no name reaches beyond the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.schema import GenerateRequest, RequestError
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.router.embedding_links import EmbeddingLinks
from tests.support.router.router_world import request

ROW = 8


@pytest.fixture
def files(tmp_path: Path) -> EmbeddingFiles:
    (tmp_path / "config.json").write_text("{}")
    return EmbeddingFiles(tmp_path / "spans")


def asked(*handles: str, count: int = 4) -> GenerateRequest:
    spans = [EmbeddingSpan(at * count, count, bytes(32), handle) for at, handle in enumerate(handles)]
    return replace(request(1, 40, 4), spans=spans)


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "spans").iterdir()}


def test_a_link_stays_when_its_sender_has_removed_its_own(files: EmbeddingFiles, tmp_path: Path) -> None:
    first, second = files.write(bytes(range(32))), files.write(bytes(32))
    links = EmbeddingLinks(files, ROW)
    linked = links.linked(asked(first, second, first))
    assert isinstance(linked, GenerateRequest)
    handles = [span.handle for span in linked.spans]
    assert len({first, second, *handles}) == 5
    for handle in (first, second):
        files.remove(handle)
    rows = bytearray(32)
    files.read(handles[0], memoryview(rows), 0, 32)
    assert rows == bytes(range(32))
    files.read(handles[0], memoryview(rows)[:8], 16, 32)
    assert rows[:8] == bytes(range(16, 24))
    links.remove([*handles, first])
    assert names(tmp_path) == set()


def test_only_its_own_names_are_removed(files: EmbeddingFiles, tmp_path: Path) -> None:
    """A request that is refused before it is linked has its sender's."""
    handle = files.write(bytes(32))
    EmbeddingLinks(files, ROW).remove([handle])
    assert names(tmp_path) == {handle}


def test_what_is_not_there_or_not_whole_fails_and_leaves_nothing(
    files: EmbeddingFiles, tmp_path: Path
) -> None:
    good, short = files.write(bytes(32)), files.write(bytes(31))
    (tmp_path / "spans" / "dd").symlink_to(tmp_path / "config.json")
    (tmp_path / "spans" / "ee").mkdir()
    before = names(tmp_path)
    links = EmbeddingLinks(files, ROW)
    for bad in (short, "ff", "dd", "ee", "../config.json", "..", "/etc/passwd", ""):
        answer = links.linked(asked(good, bad))
        assert isinstance(answer, RequestError), bad
        assert answer.status == 500
        assert "embeddings" in answer.message
        assert names(tmp_path) == before, bad


def test_a_reader_takes_exactly_its_bytes(files: EmbeddingFiles, tmp_path: Path) -> None:
    """It takes a file of the size that it expects, and none of what lies behind a name."""
    handle = files.write(bytes(32))
    (tmp_path / "spans" / "dd").symlink_to(tmp_path / "spans" / handle)
    for name, offset, num_bytes, error in (
        (handle, 0, 31, ValueError),
        (handle, 0, 33, ValueError),
        (handle, 25, 32, ValueError),
        ("dd", 0, 32, OSError),
        ("ff", 0, 32, OSError),
        ("../config.json", 0, 2, ValueError),
    ):
        with pytest.raises(error):
            files.read(name, memoryview(bytearray(8)), offset, num_bytes)


def test_files_are_private(files: EmbeddingFiles, tmp_path: Path) -> None:
    handle = files.write(b"rows")
    folder = tmp_path / "spans"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / handle).stat().st_mode & 0o777 == 0o600


def test_a_killed_routers_links_go_with_the_next(files: EmbeddingFiles, tmp_path: Path) -> None:
    handle = files.write(bytes(32))
    assert isinstance(EmbeddingLinks(files, ROW).linked(asked(handle, handle)), GenerateRequest)
    assert len(names(tmp_path)) == 3
    EmbeddingLinks(files, ROW)
    assert names(tmp_path) == {handle}
