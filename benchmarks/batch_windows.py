"""Streams beside a batch and without it, in windows by turns: `benchmarks.decode_interference --batch`."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import httpx

from tests.support.clients.streams import Answer, ask, client, prompt_ids
from tests.support.servers.server import Server

SMALLEST = 1500  # tokens of a vocabulary that every model has
LINGER_S = 2.5  # after a batch, before the window without one
ENDED = ("completed", "cancelled", "failed", "expired")


def _file(lines: int) -> bytes:
    bodies = (
        {"messages": [{"role": "user", "content": f"Say {place}."}], "max_tokens": 4}
        for place in range(lines)
    )
    return b"".join(
        json.dumps(
            {"custom_id": str(place), "method": "POST", "url": "/v1/chat/completions", "body": body}
        ).encode()
        + b"\n"
        for place, body in enumerate(bodies)
    )


async def _batch(http: httpx.AsyncClient, batch_id: str) -> tuple[str, int]:
    """Its status and how many lines are answered."""
    found = (await http.get(f"/v1/batches/{batch_id}")).json()
    return found["status"], found["request_counts"]["completed"]


async def _speed(answers: list[Answer], seconds: float) -> float:
    """The streams' tokens a second of the next seconds."""
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    end = time.perf_counter()
    return sum(answer.speed(start, end) for answer in answers)


async def _read(http: httpx.AsyncClient, seed: int, answers: list[Answer], tokens: int) -> None:
    while True:
        answers.append(Answer(time.perf_counter()))
        await ask(http, prompt_ids(32, seed, SMALLEST), answers[-1], max_tokens=tokens)


async def measure_batch(
    server: Server, lines: int, streams: int, tokens: int, window_s: float, pairs: int
) -> None:
    """Prints a line for each pair of windows, then the median and the least of what the streams keep. Every other pair
    has the window without the batch first."""
    kept: list[float] = []
    async with client(server) as http:
        file = {"file": ("lines.jsonl", _file(lines))}
        sent = (await http.post("/v1/files", files=file, data={"purpose": "batch"})).json()["id"]
        asked = {"input_file_id": sent, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        answers: list[Answer] = []
        readers = [asyncio.create_task(_read(http, seed, answers, tokens)) for seed in range(streams)]
        await _speed(answers, window_s)
        if failed := [reader for reader in readers if reader.done()]:
            failed[0].result()
        for pair in range(pairs):
            alone = await _speed(answers, window_s) if pair % 2 else 0.0
            batch = (await http.post("/v1/batches", json=asked)).json()["id"]
            while (await _batch(http, batch))[1] == 0:
                await asyncio.sleep(0.1)
            _, before = await _batch(http, batch)
            beside = await _speed(answers, window_s)
            _, after = await _batch(http, batch)
            await http.post(f"/v1/batches/{batch}/cancel")
            while (await _batch(http, batch))[0] not in ENDED:
                await asyncio.sleep(0.1)
            await asyncio.sleep(LINGER_S)
            alone = alone or await _speed(answers, window_s)
            kept.append(beside / alone)
            print(
                f"{alone:>9.1f}{beside:>9.1f}{beside / alone:>8.0%}{(after - before) / window_s:>9.1f}"
                f"{os.getloadavg()[0]:>7.1f}",
                flush=True,
            )
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    print(f"median kept {statistics.median(kept):.1%}, least {min(kept):.1%}")


def flags(folder: Path, streams: int, tokens: int) -> list[str]:
    """Returns the flags of a server with room for the streams and the lines."""
    longest = tokens + 64
    room = str((streams + 8) * longest)
    return ["--batch-dir", str(folder), "--max-num-seqs", str(streams + 24), "--max-total-tokens", room]
