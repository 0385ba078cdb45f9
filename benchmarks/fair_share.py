"""One greedy API key beside three light ones: what the light ones notice.

    python -m benchmarks.fair_share --model model.gguf --prompt 1500

The light keys ask one question after another and think in between: alone first, then beside a key that keeps 64
requests going. Times to first token of the light keys.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import httpx

from benchmarks.server import Server, running_server
from benchmarks.streams import ask, client, percentile, prompt_ids

LIGHT, GREEDY_REQUESTS = 3, 64


async def light_user(
    server: Server, user: int, seed: int, rounds: int, prompt: int, think: float
) -> list[float]:
    rng = random.Random(seed)
    ttfts: list[float] = []
    async with client(server, headers={"authorization": f"Bearer light-{user}"}) as http:
        for _ in range(rounds):
            await asyncio.sleep(rng.uniform(0.5, 1.5) * think)
            ids = prompt_ids(prompt, seed=rng.getrandbits(32))
            ttfts.append((await ask(http, ids, max_tokens=8)).ttft)
    return ttfts


async def greedy(http: httpx.AsyncClient, index: int, prompt: int, output: int) -> None:
    """One of its requests after another, for ever."""
    rng = random.Random(1000 + index)
    while True:
        ids = prompt_ids(prompt, seed=rng.getrandbits(32))
        body = {"prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0}
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def light_users(server: Server, args: argparse.Namespace, seed: int) -> list[float]:
    """`seed`: another one makes other prompts, of which the prefix cache knows nothing."""
    users = (
        light_user(server, user, seed + user, args.rounds, args.prompt, args.think) for user in range(LIGHT)
    )
    return [ttft for ttfts in await asyncio.gather(*users) for ttft in ttfts]


async def measure(server: Server, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    alone = await light_users(server, args, seed=0)
    async with client(server, headers={"authorization": "Bearer greedy"}) as http:
        tasks = [
            asyncio.create_task(greedy(http, index, args.greedy_prompt, args.greedy_output))
            for index in range(GREEDY_REQUESTS)
        ]
        while server.metrics()["moeserve:num_requests_waiting"] > 0 and not any(t.done() for t in tasks):
            await asyncio.sleep(0.2)
        await asyncio.sleep(args.think)
        beside = await light_users(server, args, seed=LIGHT)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description="One greedy API key beside three light ones.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a light key's prompt")
    parser.add_argument("--rounds", type=int, default=15, help="questions of each light key")
    parser.add_argument("--think", type=float, default=0.5, help="seconds between them")
    parser.add_argument("--greedy-prompt", type=int, default=200)
    parser.add_argument("--greedy-output", type=int, default=400)
    args = parser.parse_args()
    longest = args.prompt + args.greedy_prompt + args.greedy_output
    flags = ["--max-model-len", str(longest), "--max-total-tokens", str(40 * longest)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text(
            "\n".join(f"{name} {name}" for name in ["greedy", *(f"light-{i}" for i in range(LIGHT))])
        )
        with running_server(args.model, *flags, "--api-key-file", str(file), ready_timeout=300) as server:
            alone, beside = asyncio.run(measure(server, args))
            preemptions = server.metrics()["moeserve:num_preemptions_total"]
    for name, ttfts in (("alone", alone), ("beside the greedy key", beside)):
        print(
            f"TTFT {name}: median {percentile(ttfts, 0.5) * 1e3:.0f} ms, p95 {percentile(ttfts, 0.95) * 1e3:.0f} ms"
        )
    print(
        f"p95 ratio {percentile(beside, 0.95) / percentile(alone, 0.95):.2f}; {preemptions:.0f} preemptions"
    )


if __name__ == "__main__":
    main()
