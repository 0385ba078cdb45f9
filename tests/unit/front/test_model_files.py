"""The files of a model: a change of any of them has a model tried again whose load failed. And what is said where the
process that reads them cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.front import needs
from moeserve.front.model_files import versions_of
from moeserve.front.needs import NeedsReader
from moeserve.front.pooled_model import LoadFailed

PART = "a [1]*-{:05d}-of-00002.gguf"  # with what a pattern of file names would read otherwise


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    names = {
        "first part": PART.format(1),
        "second part": PART.format(2),
        "projector": "mmproj.gguf",
        "draft": "draft.gguf",
        "template": "chat.jinja",
        "adapter": "adapter.gguf",
        "weights": "folder/model.safetensors",
        "settings": "folder/config.json",
    }
    (tmp_path / "folder").mkdir()
    for name in names.values():
        (tmp_path / name).write_bytes(b"1")
    return {kind: tmp_path / name for kind, name in names.items()}


def config_of(files: dict[str, Path]) -> ServerConfig:
    return ServerConfig(
        model=str(files["first part"]),
        mmproj=str(files["projector"]),
        speculative_model=str(files["draft"]),
        chat_template=str(files["template"]),
        lora_modules=(f"one={files['adapter']}",),
    )


@pytest.mark.parametrize("kind", ["first part", "second part", "projector", "draft", "template", "adapter"])
def test_each_file_that_a_load_reads_counts(files: dict[str, Path], kind: str) -> None:
    config = config_of(files)
    found = [versions_of(config)]
    files[kind].write_bytes(b"two")
    found.append(versions_of(config))
    files[kind].unlink()
    found.append(versions_of(config))
    files[kind].write_bytes(b"and three")
    found.append(versions_of(config))
    assert len(set(found)) == 4, found
    assert (None in found) == (kind == "first part")
    assert versions_of(config) == found[-1]


@pytest.mark.parametrize("kind", ["weights", "settings"])
def test_each_file_of_a_folder_counts(files: dict[str, Path], kind: str) -> None:
    config = ServerConfig(model=str(files[kind].parent))
    before = versions_of(config)
    files[kind].write_bytes(b"two")
    assert versions_of(config) != before


def test_other_files_do_not_count(files: dict[str, Path]) -> None:
    beside = config_of(files)
    folder = ServerConfig(model=str(files["weights"].parent))
    before = versions_of(beside), versions_of(folder)
    files["first part"].with_name("b-00001-of-00002.gguf").touch()
    files["first part"].with_name("a 1x-00001-of-00002.gguf").touch()
    (files["weights"].parent / "log.lock").touch()
    assert (versions_of(beside), versions_of(folder)) == before


def test_a_process_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/there/is/no/python")
    with pytest.raises(LoadFailed, match="no process could be started that reads its file"):
        asyncio.run(NeedsReader(1 << 30).read(ServerConfig(model="/a.gguf")))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('a library greets'); print('{\"error\": \"it is cut short\"}')", "it is cut short"),
        ("print('a library greets')", "gave no answer"),
        ("pass", "gave no answer"),
        ("raise SystemExit(3)", "the lines above say why"),
    ],
)
def test_what_that_process_says_beside_its_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, says: str
) -> None:
    (tmp_path / "stand_in.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(needs, "MODULE", "stand_in")
    config = dataclasses.replace(ServerConfig(), model="/a.gguf")
    with pytest.raises(LoadFailed, match=says):
        asyncio.run(NeedsReader(1 << 30).read(config))
