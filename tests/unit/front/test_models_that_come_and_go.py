"""Models that join a running pool and leave it, in virtual time; and the file that keeps their names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.front.config import MAX_MODELS, FrontConfig, ServedModel
from moeserve.front.downloaded import RECORD, DownloadedModels
from moeserve.front.pool import ModelPool
from moeserve.front.schedule import State
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.pool_runs import request, run, state_of
from tests.support.front.scripted_models import Script, ScriptedModels, pool_of
from tests.support.router.virtual_time import Clock


def served(name: str) -> ServedModel:
    return ServedModel(ServerConfig(served_model_name=name), is_downloaded=True)


def names(pool: ModelPool) -> list[str]:
    return [model.name for model in pool.listed]


def test_one_that_joins_is_loaded_by_its_first_request() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script())

    async def work() -> None:
        await request(pool, "a")
        world.scripts["b"] = Script()
        pool.add(served("b"))
        await request(pool, "b")
        assert pool.find(None).name == "a", "the first of the command line stays the default"

    run(clock, pool, work())
    assert world.history == ["a", "b"]
    assert names(pool) == ["a", "b"]


def test_running_answers_of_one_that_is_removed_end_and_others_get_404() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script())

    async def work() -> None:
        running = asyncio.create_task(request(pool, "b", 30.0))
        await asyncio.sleep(3)
        model = pool.find("b")
        pool.remove("b")
        assert names(pool) == ["a"]
        for late in (pool.acquire(model), request(pool, "b")):
            with pytest.raises(ApiError, match="'b' does not exist"):
                await late
        await asyncio.sleep(10)
        assert world.loaded == ["b"], "its server has a running request"
        await running
        await request(pool, "a")
        assert pool.models == pool.listed

    run(clock, pool, work())
    assert world.history == ["b", "a"]


def test_one_that_is_loading_or_waited_for_ends_when_it_is_removed() -> None:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script(), b=Script(load_s=100.0), c=Script())

    async def work() -> None:
        long = asyncio.create_task(request(pool, "a", 50.0))
        await asyncio.sleep(3)
        waiting = asyncio.create_task(request(pool, "c"))
        await asyncio.sleep(1)
        pool.remove("c")
        await long
        loading = asyncio.create_task(request(pool, "b"))
        await asyncio.sleep(20)
        assert state_of(pool.find("b")) is State.LOADING
        pool.remove("b")
        for ended in (waiting, loading):
            with pytest.raises(ApiError, match="does not exist"):
                await ended
        await asyncio.sleep(1)
        assert world.loaded == []
        assert names(pool) == ["a"]
        assert pool.memory_used().ram == 0

    run(clock, pool, work())


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name in "xyz":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    return {name: str(tmp_path / f"{name}.gguf") for name in "xyz"}


def fresh_pool() -> tuple[Clock, ModelPool, ScriptedModels]:
    clock = Clock()
    pool, world = pool_of(clock, 1, a=Script())
    world.scripts |= {name: Script() for name in ("acme/x", "acme/y:Q4_K_M", "acme/z")}
    return clock, pool, world


def front_of(pool: ModelPool, **fields: str | int) -> FrontConfig:
    template = ServerConfig(**fields)  # type: ignore[arg-type]
    return FrontConfig(ServerConfig(), tuple(model.served for model in pool.models), template)


def test_a_download_is_served_with_the_common_options_and_again_after_a_restart(
    tmp_path: Path, files: dict[str, str]
) -> None:
    clock, pool, world = fresh_pool()
    front = front_of(pool, threads=3, kv_disk=str(tmp_path / "kv"))

    async def work() -> None:
        models = DownloadedModels(pool, front, tmp_path / "data")
        models.come("acme/x", files["x"])
        models.come("acme/y:Q4_K_M", files["y"])
        await request(pool, "acme/y:Q4_K_M")
        config = pool.find("acme/y:Q4_K_M").served.config
        assert (config.model, config.threads) == (files["y"], 3)
        assert config.kv_disk == str(tmp_path / "kv" / "acme_y_Q4_K_M"), "a folder of its own"
        assert list(models.kept()) == [""], "clients may delete what they have downloaded"

    run(clock, pool, work())
    assert world.history == ["acme/y:Q4_K_M"]
    Path(files["x"]).unlink()
    clock, pool, _ = fresh_pool()
    DownloadedModels(pool, front_of(pool), tmp_path / "data")
    assert names(pool) == ["a", "acme/y:Q4_K_M"], "the other's file is gone"


def test_one_that_is_deleted_leaves_under_all_its_names(tmp_path: Path, files: dict[str, str]) -> None:
    clock, pool, _ = fresh_pool()

    async def work() -> None:
        models = DownloadedModels(pool, front_of(pool), tmp_path)
        models.come("acme/x", files["x"])
        models.come("acme/y:Q4_K_M", files["x"])
        models.come("acme/z", files["z"])
        models.gone(files["x"])
        assert names(pool) == ["a", "acme/z"]

    run(clock, pool, work())
    assert [one["name"] for one in json.loads((tmp_path / RECORD).read_bytes())] == ["acme/z"]


def test_another_revision_takes_the_place_of_the_one_before(tmp_path: Path, files: dict[str, str]) -> None:
    clock, pool, world = fresh_pool()

    async def work() -> None:
        models = DownloadedModels(pool, front_of(pool), tmp_path)
        models.come("acme/x", files["x"])
        running = asyncio.create_task(request(pool, "acme/x", 20.0))
        await asyncio.sleep(3)
        models.come("acme/x", files["x"])
        assert world.history == ["acme/x"], "the same one again changes nothing"
        models.come("acme/x", files["y"])
        assert await request(pool, "acme/x") > 10, "there is memory for one"
        await running
        assert pool.find("acme/x").served.config.model == files["y"]
        assert names(pool) == ["a", "acme/x"]

    run(clock, pool, work())
    assert world.history == ["acme/x", "acme/x"]


def test_what_the_operator_named_stays_as_it_is(tmp_path: Path, files: dict[str, str]) -> None:
    clock, pool, _ = fresh_pool()
    front = front_of(pool)

    async def work() -> None:
        models = DownloadedModels(pool, front, tmp_path)
        models.come("a", files["x"])
        assert not pool.find("a").served.is_downloaded
        models.gone(files["x"])
        assert names(pool) == ["a"]

    run(clock, pool, work())


def test_models_are_bounded_and_a_damaged_record_harms_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / RECORD).write_text('[{"name": 3}]')
    clock, pool, _ = fresh_pool()

    async def work() -> None:
        models = DownloadedModels(pool, front_of(pool), tmp_path)
        assert names(pool) == ["a"]
        for place in range(MAX_MODELS - 1):
            pool.add(served(f"m{place}"))
        with pytest.raises(ApiError, match="delete one first"):
            models.require_room("acme/x")
        with pytest.raises(ApiError, match="delete one first"):
            models.come("acme/x", files["x"])

    run(clock, pool, work())
