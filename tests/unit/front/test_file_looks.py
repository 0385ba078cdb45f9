"""Files of models on a file system that hangs: only who asks for them waits, and not for ever. The looks that hang are
threads which wait for an event."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import State as AppState

from moeserve.config import ServerConfig
from moeserve.front import file_looks, instance, lists
from moeserve.front.config import ServedModel
from moeserve.front.file_looks import MOST_THREADS, FileLooks, existing
from moeserve.front.instance import Processes
from moeserve.front.memory import Memory
from moeserve.front.model_files import versions_of
from moeserve.front.needs import NeedsReader
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import Needs, PooledModel
from moeserve.httpserver.transport.errors import ApiError
from moeserve.processes.runtime_paths import RuntimePaths

SHORT_S = 0.05


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """Set: the file system answers."""
    event = threading.Event()
    yield event
    event.set()


def test_a_look_that_hangs_is_given_up_and_joined_by_later_ones(hang: threading.Event) -> None:
    calls: list[int] = []

    def slow() -> str:
        calls.append(1)
        hang.wait()
        return "it is there"

    async def work() -> None:
        looks, patient = FileLooks(SHORT_S), FileLooks()
        while not calls:
            with pytest.raises(TimeoutError):
                await looks.look("a", slow)
        with pytest.raises(TimeoutError):
            await looks.look("a", slow)
        assert len(calls) == 1, "one thread for each file that hangs"
        assert await patient.look("b", lambda: "another") == "another"
        waiting = [asyncio.create_task(patient.look("a", slow)) for _ in range(2)]
        await asyncio.sleep(0)
        hang.set()
        assert await asyncio.gather(*waiting) == ["it is there"] * 2
        assert len(calls) == 2

    asyncio.run(work())


def test_threads_are_bounded(hang: threading.Event) -> None:
    async def work() -> None:
        looks = FileLooks(0.0)
        for key in range(MOST_THREADS):
            with pytest.raises(TimeoutError):
                await looks.look(key, hang.wait)
        before = threading.active_count()
        with pytest.raises(TimeoutError):
            await looks.look("one more", hang.wait)
        assert threading.active_count() == before

    asyncio.run(work())


def test_an_error_reaches_each_who_waits_and_the_next_look_is_a_new_one(hang: threading.Event) -> None:
    def fails() -> None:
        hang.wait()
        raise ApiError(404, "it is gone")

    async def work() -> None:
        looks = FileLooks()
        waiting = [asyncio.create_task(looks.look("a", fails)) for _ in range(2)]
        await asyncio.sleep(0)
        hang.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(one) for one in found] == ["it is gone"] * 2
        assert await looks.look("a", lambda: 1) == 1

    asyncio.run(work())


def test_those_that_do_not_answer_count_as_existing(
    hang: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, gone, hanging = (str(tmp_path / name) for name in ("there", "gone", "hanging"))
    Path(there).touch()
    real = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: hang.wait() if path == hanging else real(path))
    assert existing([there, gone]) == {there}
    monkeypatch.setattr(file_looks, "DEADLINE_S", SHORT_S)
    assert existing([there, gone, hanging]) >= {there, hanging}


class OnHangingDisk(Processes):
    """Looks at files as a server does, and has no needs or processes."""

    async def measure(self, model: PooledModel) -> Needs:
        return Needs(Memory(1))


def test_a_model_whose_file_system_hangs_keeps_no_other_waiting(
    hang: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why at each request, and is served as soon as its file system answers again."""
    for name in "ab":
        (tmp_path / name).touch()

    def looked_at(config: ServerConfig) -> Any:
        if config.model.endswith("a"):
            hang.wait()
        return versions_of(config)

    def listed(path: str, created: float) -> str:
        if path.endswith("a"):
            hang.wait()
        return f"of {Path(path).name}"

    monkeypatch.setattr(instance, "versions_of", looked_at)
    monkeypatch.setattr(lists, "modified_at", listed)
    looks = FileLooks(SHORT_S)
    models = [ServedModel(ServerConfig(model=str(tmp_path / name), served_model_name=name)) for name in "ab"]
    pool = ModelPool(
        models,
        OnHangingDisk(RuntimePaths(tmp_path), NeedsReader(1), looks),
        Memory(1),
        load_timeout=30.0,
        idle_limit=None,
        max_waiting=100,
    )
    a, b = pool.models
    state = AppState({"created": 0, "file_looks": looks})

    async def work() -> None:
        await pool.measure_all()
        assert "does not answer" in a.failure
        while b.need is None:  # a busy machine may look at it for longer than that, too
            await pool.measure(b)
        for _ in range(2):
            with pytest.raises(ApiError, match="the file system of its file a does not answer") as refused:
                await pool.acquire(a)
            assert refused.value.status == 503
        files = await lists.files_of(state, [a, b])
        while files[1].modified_at != "of b":
            files = await lists.files_of(state, [a, b])
        assert files[0].modified_at == "1970-01-01T00:00:00Z"
        hang.set()
        while a.failure:  # until then it is not tried again for seconds
            with suppress(ApiError):
                await pool.refuse_if_hopeless(a)

    asyncio.run(work())
