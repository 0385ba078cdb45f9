"""How long the worker waits between two steps, for the router's plan: the overlap that the router keeps.

    python -m benchmarks.idle_gap --model model.gguf --batch 8

From the server's own histograms: worker_idle_seconds over all steps of requests that go on.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.server import Server, running_server
from benchmarks.streams import client, prompt_ids


async def measure(server: Server, batch: int, tokens: int) -> None:
    async with client(server) as http:
        bodies = [
            {"prompt": prompt_ids(64, seed=i), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            for i in range(batch)
        ]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    for answer in answers:
        answer.raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description="The worker's wait between two steps.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    args = parser.parse_args()
    flags = ["--max-model-len", str(args.tokens + 100), "--max-total-tokens", str(64 * (args.tokens + 100))]
    with running_server(args.model, *flags, ready_timeout=300) as server:
        asyncio.run(measure(server, max(args.batch), 20))  # first touch of everything
        for batch in args.batch:
            before = server.metrics()
            asyncio.run(measure(server, batch, args.tokens))
            after = server.metrics()

            def grown(name: str, before: dict[str, float] = before, after: dict[str, float] = after) -> float:
                return after["moeserve:" + name] - before["moeserve:" + name]

            steps = grown("worker_idle_seconds_count")
            idle = grown("worker_idle_seconds_sum") / steps
            busy = grown("decode_step_seconds_sum") / grown("decode_step_seconds_count")
            print(
                f"batch {batch}: step {busy * 1e3:.2f} ms, idle {idle * 1e3:.3f} ms, {idle / busy:.1%} of the step"
            )


if __name__ == "__main__":
    main()
