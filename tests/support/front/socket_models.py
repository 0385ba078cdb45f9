"""Models' servers that are Unix sockets in this process: each life of a server ends where its script says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.front.config import ServedModel
from moeserve.front.instance import ServerInstance
from moeserve.front.memory import Memory
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import Needs, PooledModel

CAUSE = "signal 9, Killed"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Life:
    """What a server sends for a request, and whether it ends then. `is_unreachable`: before it accepts one."""

    sends: bytes = b""
    ends: bool = True
    is_unreachable: bool = False


class SocketInstance(ServerInstance):
    def __init__(self, life: Life, path: Path) -> None:
        self.life = life
        self.requests: list[bytes] = []
        self.secret = "secret"
        self.died_by_itself = True
        self._path = path
        self._ended = asyncio.Event()
        self._connect(path)

    async def until_ready(self, tell: Callable[[str, float], None]) -> None:
        if not self.life.is_unreachable:
            self._server = await asyncio.start_unix_server(self._answer, self._path)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.lower().split(b"\r\n") if b"content-length" in line), b":0")
            self.requests.append(head + await reader.readexactly(int(length.partition(b":")[2])))
            writer.write(self.life.sends)
            await writer.drain()
        writer.close()
        if self.life.ends:
            self.die()

    def die(self) -> None:
        self._ended.set()

    async def until_ended(self) -> str:
        await self._ended.wait()
        return CAUSE

    async def stop(self) -> None:
        await self._disconnect()
        if not self.life.is_unreachable:
            self._server.close()
        self._path.unlink(missing_ok=True)


@dataclass
class SocketModels:
    """The surroundings of a pool. `lives` are those of all of its servers, in the order of their starts."""

    folder: Path
    lives: list[Life]
    started: list[SocketInstance] = field(default_factory=list)

    async def measure(self, model: PooledModel) -> Needs:
        return Needs(Memory(1))

    async def signature(self, model: PooledModel) -> int:
        return 0

    def start(self, model: PooledModel) -> SocketInstance:
        instance = SocketInstance(self.lives[len(self.started)], self.folder / str(len(self.started)))
        self.started.append(instance)
        return instance


def socket_pool(folder: Path, *lives: Life) -> tuple[ModelPool, SocketModels]:
    """A pool with one model, a."""
    world = SocketModels(folder, list(lives))
    pool = ModelPool(
        [ServedModel(ServerConfig(served_model_name="a"))],
        world,
        Memory(1),
        load_timeout=30.0,
        idle_limit=None,
        max_waiting=100,
    )
    return pool, world
