"""A server under load and faults for a long time: nothing may be lost but what a fault names.

    python -m benchmarks.soak --faults 10000 [--minutes 20] [--requests 6000] [--stop-seconds 20] [--seed 1]
        [--log faults.jsonl] [--summary soak.json]

Clients ask all the time, and each answer must be the one of the undisturbed server. Beside them others leave, break
their requests off, read late and fill the queue, and at the same time one fault of a process follows another: it is
killed or stopped, its runtime directory is full, it has few descriptors or little memory (`soak_faults.py`). A fault
may cost answers only where the documentation names it (`soak_ledger.py`). After each stretch no request and no KV slot
may be left over, and at the end no process. A stretch of requests without faults then shows whether memory grows.

The output is a table of counts and a verdict; the exit code is 1 where something was lost. The runtime directory is a
small file system of its own where this process may mount one (root); elsewhere that fault is left out, and the report
says so.

Several may run beside one another on one host, each with some cores of its own (`taskset -c 0,1 python -m ...`): ports,
directories and limits are each one's own. `python -m benchmarks.soak --report FILE ...` adds their summaries up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil

from tests.support.clients.streams import ask, client, prompt_ids
from tests.support.measuring.soak.faults import (
    Case,
    ClientFaults,
    Deed,
    ProcessFaults,
    Scene,
    small_runtime_directory,
)
from tests.support.measuring.soak.ledger import Ledger
from tests.support.measuring.soak.report import Summary, grown, growth, report
from tests.support.servers.server import REPOSITORY, running_server

MODEL: Final = REPOSITORY / "tests" / "fixtures" / "tiny-qwen3moe-q4_k_m.gguf"
CLIENTS: Final = 6
BAD_CLIENTS: Final = 3
QUEUE: Final = 32
BURST: Final = 120  # requests, of which the queue and the batch do not hold all
FLAGS: Final = [
    *("--max-num-seqs", "16", "--max-num-queued-reqs", str(QUEUE), "--max-total-tokens", "65536"),
    *("--step-timeout", "10", "--max-engine-crashes", "1000"),
]
REFUSED_S: Final = 0.5  # after which a client asks again
STRETCH: Final = 200  # faults, after which nothing may be left over
GAUGES: Final = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
IDLE_S: Final = 120.0  # for the gauges to be at the baseline
WARM_UP: Final = 1 / 6  # of the requests without faults, after which memory is compared
SHORT: Final = 16  # tokens of an answer in the stretch without faults
READY_S: Final = 240.0
ORPHAN_S: Final = 10.0  # for the last processes to end


async def ask_on(scene: Scene, stop: asyncio.Event) -> None:
    async with client(scene.server) as http:
        while not stop.is_set():
            await check(scene, http, scene.rng.choice(scene.cases))


async def check(scene: Scene, http: httpx.AsyncClient, case: Case, tokens: int | None = None) -> None:
    """One request, whose answer must be the expected one. tokens: of the answer; None: all."""
    sent = scene.ledger.clock()
    body = case.body if tokens is None else case.body | {"max_tokens": tokens}
    try:
        answer = await ask(http, case.prompt, **body)
        if answer.finish_reason is None:
            raise EOFError("a stream without an end")
    except (httpx.HTTPError, RuntimeError, EOFError) as error:
        scene.ledger.failure(sent, error)
        await asyncio.sleep(REFUSED_S)
    else:
        scene.ledger.answer(answer.tokens, case.expected[:tokens])


async def do_on(scene: Scene, deeds: Sequence[tuple[Deed, int]], stop: asyncio.Event) -> None:
    while not stop.is_set():
        (deed,) = scene.rng.choices([deed for deed, _ in deeds], [weight for _, weight in deeds])
        await deed()


@contextlib.asynccontextmanager
async def disturbances(scene: Scene) -> AsyncIterator[asyncio.Event]:
    """Clients, bad clients and faults of processes, until the block ends. The event is set when one of them has ended
    by an error, which is raised at the end."""
    stop = asyncio.Event()
    bad, processes = ClientFaults(scene).deeds, ProcessFaults(scene).deeds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(ask_on(scene, stop))
        for _ in range(BAD_CLIENTS):
            tasks.create_task(do_on(scene, bad, stop))
        tasks.create_task(do_on(scene, processes, stop))
        try:
            yield stop
        finally:
            stop.set()


async def is_idle(scene: Scene) -> None:
    """Waits until no request and no KV slot is left over."""
    deadline, values = time.monotonic() + IDLE_S, [math.nan]
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            metrics = await asyncio.to_thread(scene.server.metrics)
            values = [metrics["moeserve:" + name] for name in GAUGES]
            if not any(values):
                return
        await asyncio.sleep(0.1)
    scene.ledger.lose(f"gauges not at the baseline: {dict(zip(GAUGES, values, strict=False))}")


async def suffer(scene: Scene, faults: int, minutes: float) -> None:
    """So many faults, or as many as the time has room for, unless something is lost."""
    ledger, deadline = scene.ledger, time.monotonic() + 60 * minutes
    before = sorted(scene.processes())
    while ledger.faults.total() < faults and time.monotonic() < deadline and not ledger.lost:
        until = min(faults, ledger.faults.total() + STRETCH)
        async with disturbances(scene):
            while ledger.faults.total() < until and time.monotonic() < deadline and not ledger.lost:
                await asyncio.sleep(0.05)
        await scene.whole()
        await is_idle(scene)
        counts = f"{ledger.answered} answers, {ledger.excused.total()} excused, {len(ledger.lost)} lost"
        print(f"{ledger.faults.total():>6} faults, {counts}, load {os.getloadavg()[0]:.1f}", flush=True)
    after = sorted(scene.processes())
    if after != before:
        ledger.lose(f"other processes: {before} before, {after} after")


async def grow(scene: Scene, requests: int, summary: Summary) -> None:
    """Requests without faults. Memory after the first of them is compared with memory after the last."""

    async def some(count: int) -> None:
        async def one_client(share: int) -> None:
            async with client(scene.server) as http:
                for _ in range(share):
                    await check(scene, http, scene.rng.choice(scene.cases), SHORT)

        await asyncio.gather(
            *(one_client(count // CLIENTS + (at < count % CLIENTS)) for at in range(CLIENTS))
        )

    warm_up = int(requests * WARM_UP)
    await some(warm_up)
    at_first = memory(scene)
    await some(requests - warm_up)
    at_last = memory(scene)
    await is_idle(scene)
    summary.requests, summary.memory_at_first, summary.memory_at_last = requests, at_first, at_last
    print(f"memory after {warm_up} and after {requests} requests without faults:")
    for line in growth(at_first, at_last):
        print("  " + line)
    for name in grown(at_first, at_last):
        scene.ledger.lose(f"{name} has grown")


def memory(scene: Scene) -> dict[str, int]:
    """The processes' resident bytes."""
    found = {}
    for name, process in scene.processes().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[name] = process.memory_info().rss
    return found


def orphans(scene: Scene) -> None:
    """After the server's end."""
    _, alive = psutil.wait_procs(list(scene.seen), timeout=ORPHAN_S)
    for process in alive:
        scene.ledger.lose(f"a process is left over: {process}")
    if scene.server.runtime_dir.exists():
        scene.ledger.lose("the runtime directory is left over")


def cases() -> list[Case]:
    body = {"max_tokens": 64}
    greedy = [Case(prompt_ids(16 + 24 * i, seed=i), body) for i in range(8)]
    return greedy + [
        Case(prompt_ids(40, seed=20 + i), body | {"temperature": 0.9, "seed": i, "presence_penalty": 0.5})
        for i in range(4)
    ]


async def run(scene: Scene, faults: int, minutes: float, requests: int, summary: Summary) -> None:
    async with client(scene.server) as http:
        for case in scene.cases:
            case.expected = (await ask(http, case.prompt, **case.body)).tokens
    await suffer(scene, faults, minutes)
    if requests and not scene.ledger.lost:
        await grow(scene, requests, summary)
    scene.server.family = scene.server.processes()  # whose end `running_server` checks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A server under load and faults for a long time.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of faults, at most")
    parser.add_argument(
        "--requests", type=int, default=6000, help="without faults, during which memory may not grow"
    )
    parser.add_argument(
        "--stop-seconds", type=float, default=20.0, help="for which a process is stopped, at most"
    )
    parser.add_argument("--log", type=Path, help="a file that gets a line of JSON for each fault")
    parser.add_argument("--summary", type=Path, help="a file that gets the counts as JSON at the end")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the moments of faults")
    args = parser.parse_args(arguments)
    summary = Summary(seed=args.seed)
    with contextlib.ExitStack() as stack:
        ledger = Ledger(stack.enter_context(args.log.open("w")) if args.log else None)
        runtime = stack.enter_context(small_runtime_directory())
        rng = random.Random(args.seed)
        try:
            with running_server(args.model, *FLAGS, ready_timeout=READY_S) as server:
                scene = Scene(server, cases(), ledger, rng, BURST, args.stop_seconds, runtime)
                asyncio.run(run(scene, args.faults, args.minutes, args.requests, summary))
                if ledger.lost and args.log:
                    args.log.with_suffix(".server.log").write_text(server.log)
            orphans(scene)
        except (RuntimeError, ExceptionGroup) as error:  # the server did not come back, or did not end well
            ledger.lose("".join(traceback.format_exception(error)))
    summary.take(ledger, had_full_directory=runtime is not None)
    if args.summary:
        args.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    print("\n".join(report([summary])))
    return int(bool(summary.lost))


if __name__ == "__main__":
    raise SystemExit(main())
