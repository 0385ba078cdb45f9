"""The faults of a soak: what clients do to a server, and what happens to its processes.

Each is a method that returns when the fault has ended: for those of a process, when the server is whole again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil

from tests.support.clients.streams import Answer, ask, client, until
from tests.support.measuring.soak.ledger import Ledger, Loss
from tests.support.servers.server import Server, title_of

ENGINE: Final = ("worker", "router", "detokenizer")
SERVING: Final = ("httpserver", *ENGINE)
PYTHON_ONLY: Final = ("httpserver", "router", "detokenizer")  # whose memory --max-process-memory bounds
WHOLE_S: Final = 240.0  # for all processes to be back
MOST_LIMIT_S: Final = 5.0  # of a limit on descriptors or memory
FEW_DESCRIPTORS: Final = 136  # httpserver keeps 128 for other things than the API's connections
MOST_WAIT_S: Final = 20.0  # for the tokens after which a client leaves
MEMORY_LEFT: Final = 4 << 20  # bytes

Deed = Callable[[], Awaitable[None]]


@dataclass
class Case:
    """A request, and the tokens of its answer on the undisturbed server."""

    prompt: list[int]
    body: dict[str, Any]
    expected: list[str] = field(default_factory=list)


@dataclass
class Scene:
    """What faults act on."""

    server: Server
    cases: list[Case]
    ledger: Ledger
    rng: random.Random
    burst: int  # requests, of which queue and batch do not hold all
    stop_s: float  # for which a process is stopped, at most
    runtime: Path | None = None  # a small file system with the runtime directory; None: there is none
    seen: set[psutil.Process] = field(default_factory=set)  # every process that the server has had

    def processes(self) -> dict[str, psutil.Process]:
        """Those with titles of the server's, without "moeserve: "."""
        found = {}
        for process in self.server.processes():
            self.seen.add(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                found[title_of(process).removeprefix("moeserve: ")] = process
        return found

    async def process(self, *names: str) -> tuple[str, psutil.Process]:
        """One of them, once it is there."""
        await self.whole()
        name = self.rng.choice(names)
        return name, self.processes()[name]

    async def whole(self) -> None:
        """Waits until every process is there and /health says so. Raises RuntimeError."""
        deadline = time.monotonic() + WHOLE_S
        async with client(self.server) as http:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError, psutil.NoSuchProcess):
                    health = await http.get("/health", timeout=10)
                    if health.status_code == 200 and set(SERVING) <= self.processes().keys():
                        return
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the server did not come back:\n{self.server.log[-4000:]}")


class ClientFaults:
    """Badly behaved clients. They cost nobody else an answer, but for refusals while the queue is full."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._one_burst = asyncio.Lock()
        self.deeds: list[tuple[Deed, int]] = [
            (self.leave, 64),
            (self.break_off_body, 32),
            (self.read_late, 3),
            (self.fill_queue, 1),
        ]

    async def leave(self) -> None:
        """In the middle of a stream, or before it."""
        scene = self._scene
        with scene.ledger.fault("a client leaves") as fault:
            async with client(scene.server) as http:
                answer = Answer(time.perf_counter())
                prompt = scene.rng.choice(scene.cases).prompt
                task = asyncio.create_task(ask(http, prompt, answer, max_tokens=1000))
                tokens, seconds = scene.rng.choice((0, 1, 5, 20)), scene.rng.uniform(0.0, 0.5)
                with contextlib.suppress(TimeoutError):
                    await until(lambda: task.done() or len(answer.tokens) >= tokens, MOST_WAIT_S)
                await asyncio.wait([task], timeout=seconds)
                fault.details["tokens"] = len(answer.tokens)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    pass
                except (httpx.HTTPError, RuntimeError) as error:
                    scene.ledger.failure(fault.begun, error)

    async def break_off_body(self) -> None:
        scene = self._scene
        body = json.dumps(
            {"prompt": "x" * scene.rng.choice((100, 10_000, 1_000_000)), "max_tokens": 8}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        sent = scene.rng.randrange(len(body))
        with scene.ledger.fault("a client breaks its body off", sent=sent, length=len(body)):
            address = urlsplit(scene.server.base_url)
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(head.encode() + body[:sent])
                await asyncio.sleep(scene.rng.uniform(0.0, 0.3))
                if scene.rng.random() < 0.5:
                    writer.transport.abort()  # a reset
                writer.close()
                await writer.wait_closed()

    async def read_late(self) -> None:
        """More than the sockets' buffers hold is waiting when it reads on. Its stream must have an end all the same."""
        scene = self._scene
        body = {"prompt": scene.cases[0].prompt, "n": 4, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"max_tokens": 200, "logprobs": 5}
        with scene.ledger.fault("a client reads late") as fault:
            async with client(scene.server) as http:
                try:
                    fault.details["bytes"] = await _read_late(http, body, scene.rng.uniform(1.0, 3.0))
                except (httpx.HTTPError, RuntimeError, EOFError) as error:
                    scene.ledger.failure(fault.begun, error)

    async def fill_queue(self) -> None:
        scene, codes = self._scene, []

        async def one(http: httpx.AsyncClient) -> None:
            sent = scene.ledger.clock()
            body = {"prompt": scene.rng.choice(scene.cases).prompt, "max_tokens": 8}
            try:
                response = await http.post("/v1/completions", json=body)
                codes.append(response.status_code)
                response.raise_for_status()
            except httpx.HTTPError as error:
                scene.ledger.failure(sent, error)

        async with self._one_burst:
            with scene.ledger.fault("a full queue", Loss.OVERLOADED) as fault:
                async with client(scene.server) as http:
                    await asyncio.gather(*(one(http) for _ in range(scene.burst)))
                fault.details |= {"answered": codes.count(200), "refused": codes.count(503)}


async def _read_late(http: httpx.AsyncClient, body: dict[str, Any], pause_s: float) -> int:
    """Returns the stream's bytes. Raises EOFError for one without an end, RuntimeError for one with an error."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            response.raise_for_status()
        chunks = response.aiter_bytes(1024)
        read = len(last := await anext(chunks))
        await asyncio.sleep(pause_s)
        async for chunk in chunks:
            last = last[-1024:] + chunk
            read += len(chunk)
    if b'data: {"error"' in last:
        raise RuntimeError(last[last.index(b'data: {"error"') :].decode(errors="replace"))
    if not last.endswith(b"data: [DONE]\n\n"):
        raise EOFError("a stream without an end")
    return read


class ProcessFaults:
    """A lost httpserver takes its connections with it, and another one has to load its tokenizer; a router that says
    nothing for five seconds makes httpserver refuse. Of a lost process besides, nobody notices more than a pause."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.deeds: list[tuple[Deed, int]] = [
            (self.kill, 50),
            (self.kill_httpserver, 10),
            (self.stop, 10),
            (self.limit_descriptors, 10),
            (self.limit_memory, 10),
            *([(self.fill_directory, 10)] if scene.runtime else []),
        ]

    async def kill(self) -> None:
        name, process = await self._scene.process(*ENGINE)
        with self._scene.ledger.fault(f"{name} killed", *_excuses(name)):
            await self._killed(name, process)

    async def kill_httpserver(self) -> None:
        _, process = await self._scene.process("httpserver")
        with self._scene.ledger.fault("httpserver killed", *_excuses("httpserver")):
            await self._killed("httpserver", process)

    async def stop(self) -> None:
        """For a moment, or until it is given up."""
        name, process = await self._scene.process(*SERVING)
        seconds = self._scene.rng.uniform(0.5, self._scene.stop_s)
        with self._scene.ledger.fault(f"{name} stopped", *_excuses(name), stopped_s=round(seconds, 1)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                await asyncio.sleep(seconds)
                process.resume()
            await self._scene.whole()

    async def limit_descriptors(self) -> None:
        """So that httpserver closes new connections; the other processes need no new descriptors."""
        name, process = await self._scene.process(*SERVING)
        with self._scene.ledger.fault(f"{name} has few descriptors", *_excuses(name)):
            most = FEW_DESCRIPTORS if name == "httpserver" else process.num_fds()
            await self._limit(process, psutil.RLIMIT_NOFILE, most)

    async def limit_memory(self) -> None:
        """One that has none left ends, as a crash: a request that is open at two of them ends with an error."""
        name, process = await self._scene.process(*PYTHON_ONLY)
        excuses = (*_excuses(name), Loss.ERROR, *([Loss.OUT_OF_MEMORY] if name == "httpserver" else []))
        with self._scene.ledger.fault(f"{name} has little memory", *excuses):
            await self._limit(process, psutil.RLIMIT_DATA, process.memory_info().data + MEMORY_LEFT)

    async def _limit(self, process: psutil.Process, which: int, soft: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            before = process.rlimit(which)
            process.rlimit(which, (soft, before[1]))
            await asyncio.sleep(self._scene.rng.uniform(0.5, MOST_LIMIT_S))
            process.rlimit(which, before)
        await self._scene.whole()

    async def fill_directory(self) -> None:
        """And a process is lost meanwhile."""
        assert self._scene.runtime is not None
        full = self._scene.runtime / "full"
        name, process = await self._scene.process(*ENGINE)
        with self._scene.ledger.fault(f"a full runtime directory, {name} killed", *_excuses(name)):
            with contextlib.suppress(OSError), full.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            try:
                await self._killed(name, process)
            finally:
                full.unlink()

    async def _killed(self, name: str, process: psutil.Process) -> None:
        """Kills it, and waits until there is another one and all is well."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        async with asyncio.timeout(WHOLE_S):
            while self._scene.processes().get(name) in (None, process):
                await asyncio.sleep(0.05)
        await self._scene.whole()


def _excuses(name: str) -> tuple[Loss, ...]:
    """What the loss of this process costs."""
    if name == "httpserver":
        return Loss.CONNECTION, Loss.LOADING
    return (Loss.UNRESPONSIVE,) if name == "router" else ()


@contextlib.contextmanager
def small_runtime_directory() -> Iterator[Path | None]:
    """A file system of 256 KiB at $XDG_RUNTIME_DIR; None where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="moeserve-soak-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            yield None
            return
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = before
            subprocess.run(["umount", "--lazy", folder], check=True)  # what was killed may still end
