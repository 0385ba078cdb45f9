"""Which paths /v1/load_lora_adapter may name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve.httpserver.generation.engine.served_adapters import path_within
from moeserve.httpserver.transport.errors import ApiError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "adapters"
    (found / "sql").mkdir(parents=True)
    (found / "out").symlink_to(tmp_path)
    (found / "in").symlink_to(found / "sql")
    (found / "loop").symlink_to(found / "loop")
    (tmp_path / "adapters-of-others").mkdir()
    return Path(os.path.realpath(found))


def test_paths_within(folder: Path) -> None:
    for text in ("sql", "./sql/", "in", "sql/../sql", str(folder / "sql")):
        assert path_within(str(folder), text) == folder / "sql", text


@pytest.mark.parametrize(
    ("text", "status"),
    [
        *[("..", 400), ("../adapters-of-others", 400), ("out", 400), ("out/adapters-of-others", 400)],
        *[("/", 400), ("/nowhere", 400), ("a\0b", 400), ("absent", 404), ("loop", 404)],
        *[("a" * 300, 404), ("a/" * 2000, 404), ("../" + "a" * 300, 400)],
    ],
)
def test_paths_outside_and_missing_ones(folder: Path, text: str, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        path_within(str(folder), text)
    assert refused.value.status == status
