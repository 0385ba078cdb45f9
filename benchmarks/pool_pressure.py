"""Many clients that name no max_tokens, in a KV pool that holds few requests of full length.

    python -m benchmarks.pool_pressure

Each of 16 clients asks several times, and may use the whole context; the pool holds four such requests. Answers end by
themselves after lengths drawn by the sampler (a set of stop tokens is hit with even chance at each token). The
server admits by predicted length and preempts where that was wrong. Beside it, what full reservation would do: the same
server with four places. Every answer is compared with the one that its request gets alone (with --skip-alone: in
the other run).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server import Server, running_server
from benchmarks.streams import client, prompt_ids

CLIENTS, FULL_LENGTH_REQUESTS = 16, 4
CONTEXT, PROMPT = 2048, 100
SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@dataclass
class Run:
    seconds: float
    mean_running: float  # requests, over the time that all clients were there
    preemptions: float
    recomputed: float
    answers: list[str]
    lengths: list[int]


def body(index: int, mean_length: int, stop: list[str], vocabulary: int) -> dict[str, Any]:
    """The rest of the context is asked for; 1 token in mean_length ends the answer, or one of `stop`."""
    ends = {"stop": stop} if stop else {"stop_token_ids": list(range(0, vocabulary, mean_length))[1:256]}
    return (
        SAMPLING
        | ends
        | {
            "prompt": prompt_ids(PROMPT, seed=100 + index, highest=min(vocabulary, 4000)),
            "max_tokens": CONTEXT - PROMPT,
            "seed": index,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,
        }
    )


async def complete(http: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, int]:
    response = await http.post("/v1/completions", json=request)
    response.raise_for_status()
    answer = response.json()
    return str(answer["choices"][0]["logprobs"]["tokens"]), int(answer["usage"]["completion_tokens"])


async def run_all(server: Server, requests: list[dict[str, Any]], clients: int) -> Run:
    """Client c asks requests c, c + clients, c + 2 clients and so on, one after another."""
    before = server.metrics()
    start = time.perf_counter()
    samples: list[float] = []
    async with client(server) as http:
        found: list[tuple[str, int]] = [("", 0)] * len(requests)

        async def one_client(first: int) -> None:
            for index in range(first, len(requests), clients):
                found[index] = await complete(http, requests[index])

        tasks = [asyncio.create_task(one_client(first)) for first in range(clients)]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.1)
            samples.append(running(await http.get("/metrics")))
        await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    after = server.metrics()
    return Run(
        seconds,
        sum(samples) / max(len(samples), 1),
        after["moeserve:num_preemptions_total"] - before["moeserve:num_preemptions_total"],
        after["moeserve:recomputed_tokens_total"] - before["moeserve:recomputed_tokens_total"],
        [text for text, _ in found],
        [length for _, length in found],
    )


def running(metrics: httpx.Response) -> float:
    name = "moeserve:num_requests_running{"
    (line,) = [line for line in metrics.text.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


def served(model: Path | None, requests: list[dict[str, Any]], places: int, clients: int) -> Run:
    pool = FULL_LENGTH_REQUESTS * CONTEXT
    flags = ["--max-model-len", str(CONTEXT), "--max-total-tokens", str(pool)]
    with running_server(model, *flags, "--max-num-seqs", str(places), ready_timeout=300) as server:
        return asyncio.run(run_all(server, requests, clients))


def main() -> None:
    parser = argparse.ArgumentParser(description="Clients without max_tokens in a small KV pool.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--mean-length", type=int, default=300, help="of an answer, in tokens")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=1536,
        help="tokens of the model (default: those of the packaged one)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends answers, for models of a large vocabulary"
    )
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument(
        "--skip-alone", action="store_true", help="compare the answers of the two ways with each other only"
    )
    args = parser.parse_args()
    requests = [
        body(index, args.mean_length, args.stop, args.vocabulary) for index in range(CLIENTS * args.rounds)
    ]
    expected = None if args.skip_alone else served(args.model, requests, places=1, clients=1)
    for name, places in (("full reservation", FULL_LENGTH_REQUESTS), ("predicted lengths", CLIENTS)):
        run = served(args.model, requests, places, CLIENTS)
        expected = expected or run
        equal = sum(a == b for a, b in zip(run.answers, expected.answers, strict=True))
        print(
            f"{name}: {run.seconds:.2f} s, {run.mean_running:.1f} running on average, "
            f"{run.preemptions:.0f} preemptions, {run.recomputed:.0f} tokens computed again, "
            f"{equal} of {len(requests)} answers as expected"
        )
    print(f"lengths of the answers: {sorted(run.lengths)}")


if __name__ == "__main__":
    main()
