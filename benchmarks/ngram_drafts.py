"""Speed with n-gram drafts beside none, on texts that repeat themselves.

    python -m benchmarks.ngram_drafts [--model MODEL] [--streams 1 4 16] [flags of the server]

Two servers of one model, one that drafts, take turns. Each answer continues a passage that its prompt has several
times, greedily. Columns: streams at once; tokens a second of all, the median of the rounds, without drafts and with;
their quotient; tokens a step and stream; the share of drafts that were right. The texts must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

from tests.support.clients.streams import ask, client
from tests.support.servers.server import Server, running_server

PASSAGE, TIMES, LEFT = (
    48,
    5,
    16,
)  # tokens, how often the prompt has them, and how many of the last time are left out
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 8}
COUNTS = (
    "generation_tokens",
    "engine_steps",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(count)
    passages = [[rng.randrange(100, vocabulary) for _ in range(PASSAGE)] for _ in range(count)]
    return [(passage * TIMES)[:-LEFT] for passage in passages]


async def answers(server: Server, texts: list[list[int]], length: int) -> tuple[list[list[str]], float]:
    """And the tokens a second of all."""
    async with client(server) as http:
        began = time.perf_counter()
        found = await asyncio.gather(*(ask(http, text, max_tokens=length) for text in texts))
        seconds = time.perf_counter() - began
    return [answer.tokens for answer in found], length * len(texts) / seconds


def counts(server: Server) -> dict[str, float]:
    metrics = server.metrics()
    return {name: metrics[f"moeserve:{name}_total"] for name in COUNTS}


def compare(off: Server, on: Server, texts: list[list[int]], length: int, rounds: int) -> str:
    """A row of the table."""
    speeds: dict[Server, list[float]] = {off: [], on: []}
    expected: list[list[list[str]]] = []
    for server in (off, on):  # their prompts are cached then
        expected.append(asyncio.run(answers(server, texts, length))[0])
    if expected[0] != expected[1]:
        raise SystemExit("the texts differ")
    before = counts(on)
    for _ in range(rounds):
        for server in (off, on):
            speeds[server].append(asyncio.run(answers(server, texts, length))[1])
    delta = {name: value - before[name] for name, value in counts(on).items()}
    without, with_drafts = (statistics.median(speeds[server]) for server in (off, on))
    each = delta["generation_tokens"] / delta["engine_steps"] / len(texts)
    right = delta["spec_decode_num_accepted_tokens"] / max(delta["spec_decode_num_draft_tokens"], 1.0)
    quotient = with_drafts / without
    return f"{len(texts):7} {without:9.1f} {with_drafts:9.1f} {quotient:6.2f} {each:6.2f} {right:6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: the demonstration model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=1500, help="prompts are of token ids below it")
    parser.add_argument("--drafts", type=json.loads, default=DRAFTS, help="--speculative-config")
    args, flags = parser.parse_known_args()
    with (
        running_server(args.model, *flags) as off,
        running_server(args.model, *flags, "--speculative-config", json.dumps(args.drafts)) as on,
    ):
        print(f"{'streams':>7} {'off tok/s':>9} {'on tok/s':>9} {'on/off':>6} {'a step':>6} {'right':>6}")
        for streams in args.streams:
            texts = prompts(streams, args.vocabulary)
            print(compare(off, on, texts, args.tokens, args.rounds), flush=True)


if __name__ == "__main__":
    main()
