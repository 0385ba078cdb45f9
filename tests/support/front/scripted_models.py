"""Models without processes, for the pool of a front: what each needs, how long its load takes, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moeserve.config import ServerConfig
from moeserve.front.config import ServedModel
from moeserve.front.memory import Memory
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import Instance, LoadFailed, Needs, PooledModel
from tests.support.router.virtual_time import Clock

UNIT = 1 << 30
GPU_BYTES = 80 * UNIT


@dataclass
class Script:
    need: int = 1  # in units
    gpus: int = 0  # which it takes whole
    look_s: float = 0.01  # at its file
    load_s: float = 2.0
    stop_s: float = 0.1
    failure: str = ""  # of the load
    is_crash: bool = False  # the failure is a crash
    file_error: str = ""  # of the look at the file
    version: int = 0  # of the file
    start_error: str = ""  # of the start of its processes
    bug: str = ""  # where this server fails by an error of its own: "look", "start" or "load"

    def fail_by_bug(self, where: str) -> None:
        if self.bug == where:
            raise RuntimeError(f"a bug in the {where}")


@dataclass
class ScriptedInstance(Instance):
    model: PooledModel
    script: Script
    world: ScriptedModels
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""
    is_answering: bool = True
    died_by_itself: bool = True

    async def until_ready(self, tell: Callable[[str, float], None]) -> None:
        tell("weights", 0.0)
        self.script.fail_by_bug("load")
        await asyncio.sleep(self.script.load_s / 2)
        tell("weights", 0.5)
        await asyncio.sleep(self.script.load_s / 2)
        if self.script.failure:
            raise LoadFailed(self.script.failure, is_crash=self.script.is_crash)

    async def until_ended(self) -> str:
        await self.ended.wait()
        return self.cause

    async def is_ready(self) -> bool:
        return self.is_answering

    async def stop(self) -> None:
        assert not self.model.running or self.ended.is_set(), "a server with running requests is stopped"
        await asyncio.sleep(self.script.stop_s)
        self.world.loaded.remove(self.model.name)

    def die(self, cause: str, *, by_itself: bool = True) -> None:
        self.cause, self.died_by_itself = cause, by_itself
        self.ended.set()


@dataclass
class ScriptedModels:
    """What a pool asks of processes. `loaded` has the models with processes; `history` the loads."""

    scripts: dict[str, Script]
    room: int  # in units
    num_gpus: int = 0
    loaded: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    async def measure(self, model: PooledModel) -> Needs:
        self.measured.append(model.name)
        script = self.scripts[model.name]
        await asyncio.sleep(script.look_s)
        script.fail_by_bug("look")
        if script.file_error:
            raise LoadFailed(script.file_error)
        each = (GPU_BYTES,) * script.gpus
        choices = tuple(range(self.num_gpus)) if each else ()
        return Needs(Memory(script.need * UNIT), each, choices, gpus_there=(GPU_BYTES,) * self.num_gpus)

    async def signature(self, model: PooledModel) -> int:
        return self.scripts[model.name].version

    def start(self, model: PooledModel) -> ScriptedInstance:
        self.scripts[model.name].fail_by_bug("start")
        if error := self.scripts[model.name].start_error:
            raise LoadFailed(error)
        self.loaded.append(model.name)
        self.history.append(model.name)
        used = sum(self.scripts[name].need for name in self.loaded)
        assert used <= self.room, f"{self.loaded} need {used} of {self.room}"
        return ScriptedInstance(model, self.scripts[model.name], self)


def pool_of(
    clock: Clock,
    room: int,
    pinned: tuple[str, ...] = (),
    *,
    load_timeout: float = 300.0,
    idle_limit: float | None = None,
    max_waiting: int = 1000,
    num_gpus: int = 0,
    **scripts: Script,
) -> tuple[ModelPool, ScriptedModels]:
    world = ScriptedModels(scripts, room, num_gpus)
    served = [ServedModel(ServerConfig(served_model_name=name), name in pinned) for name in scripts]
    pool = ModelPool(
        served,
        world,
        Memory(room * UNIT),
        load_timeout=load_timeout,
        idle_limit=idle_limit,
        max_waiting=max_waiting,
        clock=clock.monotonic,
    )
    return pool, world
