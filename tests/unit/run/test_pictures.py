"""Pictures from files, and their paths within a question."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve.cli.run.pictures import MOST_BYTES, media_type_of, paths_in, read_picture
from moeserve.errors import UserError

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def test_the_type_is_that_of_the_bytes(tmp_path: Path) -> None:
    for beginning, media_type in (
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\0\0\0\0WAVE", None),
        (b"BM", None),
        (b"", None),
    ):
        assert media_type_of(beginning) == media_type
    (tmp_path / "a.jpg").write_bytes(PNG)
    picture = read_picture(str(tmp_path / "a.jpg"))
    assert picture.url.startswith("data:image/png;base64,iVBORw0KGgo")
    assert picture.size == len(PNG)


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")  # nothing writes to it: to open it would wait
    large = tmp_path / "large.png"
    large.touch()
    os.truncate(large, MOST_BYTES + 1)
    for name, why in (
        ("text.png", "is not a PNG, JPEG, WebP or GIF picture"),
        ("folder.png", "is not a file"),
        ("pipe.png", "is not a file"),
        ("large.png", "is larger than 20 MiB; make it smaller"),
        ("none.png", "cannot be read: No such file or directory"),
        ("nul\0.png", "cannot be read: embedded null byte"),
    ):
        with pytest.raises(UserError, match=why):
            read_picture(str(tmp_path / name))


def test_paths_within_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.png", "two words.JPG", "b.webp", "c.txt"):
        (tmp_path / name).write_bytes(PNG)
    for text, paths in (
        (f"What is in {tmp_path}/a.png?", [f"{tmp_path}/a.png"]),
        ("./a.png and 'two words.JPG', please", ["./a.png", "two words.JPG"]),
        (r"dropped: two\ words.JPG", ["two words.JPG"]),
        ('"two words.JPG"', ["two words.JPG"]),
        ("what's in a.png, and what's in b.webp?", ["a.png", "b.webp"]),
        ("(a.png)", []),  # a bracket may belong to the name
        ("~/a.png", ["~/a.png"]),
        ("c.txt none.png http://host/a.png", []),
        ("nul\0.png " + "x" * 300 + ".png", []),
    ):
        assert list(paths_in(text)) == paths, text
