"""When a model was modified, as Ollama's lists say: the time of its file, not of the server's start."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from moeserve.front import lists
from moeserve.front.file_looks import FileLooks
from moeserve.httpserver.ollama.models import modified_at
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock

STARTED = 86400.0 * 365  # the server, in 1971
AT_START = "1971-01-01T00:00:00Z"
SUMMER = 962_409_600.0
IN_SUMMER = "2000-07-01T00:00:00Z"


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert modified_at(str(path), STARTED) == AT_START, "it is not there yet"
    path.touch()
    os.utime(path, (0, SUMMER))
    assert modified_at(str(path), STARTED) == IN_SUMMER
    (tmp_path / "link.gguf").symlink_to(path)
    assert modified_at(str(tmp_path / "link.gguf"), STARTED) == IN_SUMMER


def test_of_a_folder_the_newest_file(tmp_path: Path) -> None:
    for name, when in (("config.json", 1000.0), ("model.safetensors", SUMMER), ("tokenizer.json", 5.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, when))
    (tmp_path / "cache").mkdir()  # of now, and no part of the model
    assert modified_at(str(tmp_path), STARTED) == IN_SUMMER


@pytest.mark.parametrize("seconds", [1e13, -1e13])
def test_a_time_beyond_the_calendar(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    try:
        os.utime(path, (0, seconds))
    except (OSError, OverflowError):
        pytest.skip("this file system keeps no such time")
    assert modified_at(str(path), STARTED)


def test_several_models(tmp_path: Path) -> None:
    pool, _ = pool_of(Clock(), 2, a=Script(), b=Script())
    path = tmp_path / "a.gguf"
    path.touch()
    os.utime(path, (0, SUMMER))
    first, second = pool.models
    config = dataclasses.replace(first.served.config, model=str(path))
    first.served = dataclasses.replace(first.served, config=config)
    config = dataclasses.replace(config, model=str(tmp_path / "gone.gguf"))
    second.served = dataclasses.replace(second.served, config=config)
    app = FastAPI()
    app.state.pool, app.state.created, app.state.file_looks = pool, int(STARTED), FileLooks()
    app.include_router(lists.router)
    tags = TestClient(app).get("/api/tags").json()["models"]
    assert [tag["modified_at"] for tag in tags] == [IN_SUMMER, AT_START]
    (file,) = asyncio.run(lists.files_of(app.state, [first]))
    assert lists.shown_unloaded(first, file)["modified_at"] == IN_SUMMER
