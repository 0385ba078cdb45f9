"""How long answers pause when a process of the server is killed.

    python -m benchmarks.recovery --model 12-layers.gguf --streams 1 8 --kills 5

Greedy streams run; one process is killed at a random moment of their decode. For each stream the pause is the longest
time between two tokens from the kill on. All texts are compared with those of a run without kills; on a GPU, where they
may take another course after the pause, their usage (`--compare usage`). Other flags are the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from pathlib import Path

from tests.support.clients.streams import Answer, ask, client, percentile, prompt_ids, until
from tests.support.servers.server import Server, running_server

PROCESSES = ("worker", "router", "detokenizer")
WARM_TOKENS = 8  # that each stream has before a kill


async def streams(
    server: Server, prompts: list[list[int]], tokens: int, victim: str | None, delay: float
) -> list[Answer]:
    """Runs them all at once; `victim` is killed `delay` seconds after the last has begun. Returns the answers, of which
    `sent` is the moment of the kill."""
    async with client(server) as http:
        answers = [Answer(time.perf_counter()) for _ in prompts]
        tasks = [
            asyncio.create_task(ask(http, prompt, answer, max_tokens=tokens))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        await until(lambda: all(len(answer.times) >= WARM_TOKENS for answer in answers))
        await asyncio.sleep(delay)
        killed = time.perf_counter()
        if victim is not None:
            server.named(victim).kill()
        await asyncio.gather(*tasks)
    for answer in answers:
        answer.sent = killed
    return answers


def pause(answer: Answer) -> float:
    """Seconds. Raises SystemExit for an answer that had ended before the kill."""
    last = max(t for t in answer.times if t <= answer.sent)
    if last == answer.times[-1]:
        raise SystemExit("an answer ended before the kill: a larger --tokens is needed")
    return answer.gaps(last)[-1]


def are_equal(answer: Answer, undisturbed: Answer, compared: str) -> bool:
    if compared == "tokens":
        return answer.tokens == undisturbed.tokens
    counts = ("prompt_tokens", "completion_tokens")
    return len(answer.tokens) == len(undisturbed.tokens) and all(
        answer.usage[name] == undisturbed.usage[name] for name in counts
    )


async def healthy(server: Server) -> None:
    async with client(server) as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long answers pause when a process is killed.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--kills", type=int, default=5, help="of each process, for each number of streams")
    parser.add_argument("--processes", nargs="+", default=PROCESSES, choices=PROCESSES)
    parser.add_argument("--compare", choices=("tokens", "usage"), default="tokens")
    parser.add_argument("--seed", type=int, default=0)
    args, more = parser.parse_known_args()
    rng = random.Random(args.seed)
    flags = ["--max-total-tokens", "16384", "--max-engine-crashes", "1000", *more]
    print(f"{'streams':>8} {'process':<12}{'median s':>9}{'longest s':>10}  load")
    with running_server(args.model, *flags, ready_timeout=600) as server:
        for count in args.streams:
            prompts = [prompt_ids(args.prompt, seed=i) for i in range(count)]
            expected = asyncio.run(streams(server, prompts, args.tokens, None, 0))
            for victim in args.processes:
                pauses: list[float] = []
                for _ in range(args.kills):
                    answers = asyncio.run(streams(server, prompts, args.tokens, victim, rng.uniform(0, 0.5)))
                    for answer, undisturbed in zip(answers, expected, strict=True):
                        if not are_equal(answer, undisturbed, args.compare):
                            raise SystemExit(f"an answer changed when the {victim} was killed")
                    pauses.append(max(map(pause, answers)))
                    asyncio.run(healthy(server))
                pauses.sort()
                middle, load = percentile(pauses, 0.5), os.getloadavg()[0]
                print(f"{count:>8} {victim:<12}{middle:>9.2f}{pauses[-1]:>10.2f}  {load:.1f}", flush=True)


if __name__ == "__main__":
    main()
