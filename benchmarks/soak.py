"""A server under load and faults for a long time: nothing may be lost but what a fault names.

    python -m benchmarks.soak --faults 10000 [--minutes 10] [--stop-seconds 20]

Clients ask all the time, and each answer must be the one of the undisturbed server. Beside them one fault follows
another: processes are killed and stopped, clients leave or read late, the queue is filled, the runtime directory is
full. A fault may cost answers only where it names them: those on a killed httpserver, and refusals while the queue is
full. At the end no request, KV slot, process or memory may be left over.

The runtime directory is a small file system of its own where this process may mount one (root); elsewhere that fault is
left out, and the report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.server import REPOSITORY, Server, running_server, title_of
from benchmarks.streams import Answer, ask, client, prompt_ids

MODEL = REPOSITORY / "tests" / "fixtures" / "tiny-qwen3moe-q4_k_m.gguf"
ENGINE = ("worker", "router", "detokenizer")
SERVING = ("httpserver", *ENGINE)
CLIENTS = 6
QUEUE = 32
BURST = 120  # requests, of which the queue and the batch do not hold all
FLAGS = [
    *("--max-num-seqs", "16", "--max-num-queued-reqs", str(QUEUE), "--max-total-tokens", "65536"),
    *("--step-timeout", "5", "--max-engine-crashes", "1000"),
]
BATCH = 25  # faults, after which nothing may be left over
WHOLE_S = 90.0  # for all processes to be back
SAME_MEMORY = 1.05
MEMORY_GRAIN = 8 << 20  # bytes by which a process's memory may differ besides


@dataclass
class Case:
    prompt: list[int]
    body: dict[str, Any]
    expected: list[str] = field(default_factory=list)


@dataclass
class Soak:
    server: Server
    cases: list[Case]
    rng: random.Random
    stop_s: float
    runtime: Path | None  # a small file system, if there is one
    answered: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)
    costs_answers: bool = False  # the fault under way may
    costly_until: float = 0.0  # a request that was sent before may have been lost
    fault: str = ""

    async def ask_on(self, http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.check(http, self.rng.choice(self.cases))

    async def check(self, http: httpx.AsyncClient, case: Case) -> None:
        """One request, whose answer must be the expected one unless a fault excuses it."""
        sent = time.perf_counter()
        try:
            answer = await ask(http, case.prompt, **case.body)
        except (httpx.HTTPError, RuntimeError) as error:
            if self.costs_answers or sent < self.costly_until:
                self.excused += 1
                await asyncio.sleep(0.2)
            else:
                self.wrong.append(f"{self.fault}: {type(error).__name__}: {str(error)[:200]}")
            return
        self.answered += 1
        if answer.tokens != case.expected:
            self.wrong.append(f"{self.fault}: another answer, {len(answer.tokens)} tokens")

    # ---------------------------------------------------------------- faults

    async def kill(self, http: httpx.AsyncClient) -> None:
        self.server.named(self.rng.choice(ENGINE)).kill()
        await self.whole(http)

    async def kill_httpserver(self, http: httpx.AsyncClient) -> None:
        with self.costing():
            self.server.named("httpserver").kill()
            await self.whole(http)

    async def stop(self, http: httpx.AsyncClient) -> None:
        process = self.server.named(self.rng.choice(ENGINE))
        process.suspend()
        await asyncio.sleep(self.stop_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        await self.whole(http)

    async def leave(self, http: httpx.AsyncClient) -> None:
        answer = Answer(time.perf_counter())
        task = asyncio.create_task(ask(http, self.rng.choice(self.cases).prompt, answer, max_tokens=1000))
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def read_late(self, http: httpx.AsyncClient) -> None:
        """More than the sockets' buffers hold is waiting when it reads on."""
        case = self.cases[0]
        body = {"prompt": case.prompt, "n": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        request = body | {"max_tokens": 400, "logprobs": 5}
        async with http.stream("POST", "/v1/completions", json=request) as response:
            chunks = response.aiter_bytes(1024)
            await anext(chunks)
            await asyncio.sleep(2)
            last = b""
            async for chunk in chunks:
                last = last[-64:] + chunk
        if not last.endswith(b"data: [DONE]\n\n"):
            self.wrong.append("read late: the stream has no end")

    async def fill_queue(self, http: httpx.AsyncClient) -> None:
        async def one() -> int:
            body = {"prompt": self.rng.choice(self.cases).prompt, "max_tokens": 8}
            try:
                return (await burst.post("/v1/completions", json=body)).status_code
            except httpx.HTTPError as error:
                self.wrong.append(f"full queue: {type(error).__name__}; the log: {self.server.log[-1500:]}")
                return 0

        with self.costing():
            async with client(self.server) as burst:
                codes = Counter(await asyncio.gather(*(one() for _ in range(BURST))))
        if set(codes) - {0, 200, 503}:
            self.wrong.append(f"full queue: {dict(codes)}")

    async def fill_directory(self, http: httpx.AsyncClient) -> None:
        """And a process is lost meanwhile."""
        assert self.runtime is not None
        full = self.runtime / "full"
        with contextlib.suppress(OSError), full.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        try:
            await self.kill(http)
        finally:
            full.unlink()

    @contextlib.contextmanager
    def costing(self) -> Iterator[None]:
        self.costs_answers = True
        try:
            yield
        finally:
            self.costs_answers = False
            self.costly_until = time.perf_counter()

    # ---------------------------------------------------------------- checks

    async def whole(self, http: httpx.AsyncClient) -> None:
        """Waits until every process is there and /health says so."""
        deadline = time.monotonic() + WHOLE_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            names = {name for name, _ in memory(self.server)}
            with contextlib.suppress(httpx.HTTPError):
                if set(SERVING) <= names and (await http.get("/health")).status_code == 200:
                    return
        raise RuntimeError(f"the server did not come back:\n{self.server.log[-4000:]}")

    async def is_idle(self) -> None:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for _ in range(200):
            await asyncio.sleep(0.1)
            metrics = self.server.metrics()
            if all(metrics["moeserve:" + name] == 0 for name in gauges):
                return
        self.wrong.append(f"not at the baseline: {[metrics['moeserve:' + name] for name in gauges]}")


def memory(server: Server) -> list[tuple[str, int]]:
    """The processes' titles without "moeserve: ", and their resident bytes."""
    found = []
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((title_of(process).removeprefix("moeserve: "), process.memory_info().rss))
    return sorted(found)


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


@contextlib.asynccontextmanager
async def clients(soak: Soak) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with client(soak.server) as http:
        tasks = [asyncio.create_task(soak.ask_on(http, stop)) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


async def run(soak: Soak, faults: int, minutes: float) -> Counter[str]:
    """Returns how many faults of each kind there were."""
    kinds: list[tuple[Callable[[httpx.AsyncClient], Awaitable[None]], int]] = [
        (soak.leave, 55),
        (soak.kill, 25),
        (soak.read_late, 6),
        (soak.fill_queue, 6),
        (soak.kill_httpserver, 2),
        (soak.stop, 2),
        *([(soak.fill_directory, 4)] if soak.runtime else []),
    ]
    done: Counter[str] = Counter()
    async with client(soak.server) as http:
        for case in soak.cases:
            case.expected = (await ask(http, case.prompt, **case.body)).tokens
        deadline = time.monotonic() + 60 * minutes
        at_first: dict[str, int] = {}
        while done.total() < faults and time.monotonic() < deadline and not soak.wrong:
            async with clients(soak):
                for _ in range(BATCH):
                    (fault,) = soak.rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
                    soak.fault = fault.__name__
                    await fault(http)
                    done[soak.fault] += 1
                    if soak.wrong or time.monotonic() > deadline:
                        break
            await soak.is_idle()
            at_last = dict(memory(soak.server))
            at_first = at_first or at_last
            print(f"{done.total():>6} faults, {soak.answered} answers, {soak.excused} excused", flush=True)
        if at_last.keys() != at_first.keys():
            soak.wrong.append(f"other processes: {sorted(at_first)} before, {sorted(at_last)} now")
        for name, size in at_last.items():
            first = at_first.get(name, 0)
            print(f"  {name:<20}{first >> 20:>6} MiB at first, {size >> 20:>6} MiB at last")
            if size > first * SAME_MEMORY + MEMORY_GRAIN:
                soak.wrong.append(f"{name} has grown")
    return done


def cases() -> list[Case]:
    body = {"max_tokens": 96}
    greedy = [Case(prompt_ids(16 + 24 * i, seed=i), body) for i in range(8)]
    return greedy + [
        Case(prompt_ids(40, seed=20 + i), body | {"temperature": 0.9, "seed": i, "presence_penalty": 0.5})
        for i in range(4)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="A server under load and faults for a long time.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=1e6, help="at most")
    parser.add_argument("--stop-seconds", type=float, default=20.0, help="for which a process is stopped")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with small_runtime_directory() as runtime, running_server(args.model, *FLAGS) as server:
        soak = Soak(server, cases(), random.Random(args.seed), args.stop_seconds, runtime)
        done = asyncio.run(run(soak, args.faults, args.minutes))
        server.family = server.processes()
    if runtime is None:
        print("the fault of a full runtime directory was left out: no file system could be mounted")
    print(f"{done.total()} faults: {dict(done)}; {soak.answered} answers, {soak.excused} excused")
    for line in soak.wrong:
        print("WRONG:", line)
    raise SystemExit(bool(soak.wrong))


if __name__ == "__main__":
    main()
