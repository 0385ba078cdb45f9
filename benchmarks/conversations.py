"""Conversations that share a system prompt and grow turn by turn: what the prefix cache saves.

    python -m benchmarks.conversations --model model.gguf --system 2000 --turns 10

Eight conversations, all at once. Each turn sends the whole conversation so far and a new question. Once with room for
all, once in a pool too small for them, where the shared prompt must never be computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.clients.streams import Answer, ask, client, prompt_ids
from tests.support.servers.server import Server, running_server

CONVERSATIONS = 8
QUESTION, ANSWER = 40, 40  # tokens


@dataclass(frozen=True)
class Turn:
    number: int
    prompt: int  # tokens
    cached: int
    ttft: float


async def converse(http: httpx.AsyncClient, system: list[int], seed: int, turns: int) -> list[Turn]:
    found: list[Turn] = []
    rng = random.Random(seed)
    so_far = list(system)
    for number in range(turns):
        so_far += prompt_ids(QUESTION, seed=1000 * (seed + 1) + number)
        answer: Answer = await ask(http, so_far, max_tokens=ANSWER)
        found.append(Turn(number, len(so_far), answer.cached, answer.ttft))
        so_far += [int(token.removeprefix("token_id:")) for token in answer.tokens]
        await asyncio.sleep(rng.uniform(0.0, 0.2))
    return found


async def measure(server: Server, system: list[int], turns: int) -> list[Turn]:
    async with client(server) as http:
        await ask(http, prompt_ids(64, seed=7), max_tokens=8)  # first touch of everything
        first = await converse(http, system, 0, 1)  # of all: computes the system prompt
        rest = await asyncio.gather(*(converse(http, system, 1 + i, turns) for i in range(CONVERSATIONS)))
    return first + [turn for turns in rest for turn in turns]


def report(name: str, turns: list[Turn], system: int) -> None:
    first, rest = turns[0], turns[1:]
    later = [turn for turn in rest if turn.number > 0]
    cached = sum(turn.cached for turn in later) / sum(turn.prompt for turn in later)
    ttfts = sorted(turn.ttft for turn in later)
    kept = sum(turn.cached >= system for turn in rest)
    print(
        f"{name}: {cached:.1%} of the prompt tokens after the first turn from the cache; {kept} of {len(rest)} turns "
        f"found the whole system prompt; TTFT {first.ttft:.2f} s of the first, later turns "
        f"{ttfts[len(ttfts) // 2] / first.ttft:.1%} of that in the median, {ttfts[-1] / first.ttft:.1%} at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversations that share a system prompt.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    system = prompt_ids(args.system, seed=0)
    grown = args.turns * (QUESTION + ANSWER)
    longest = args.system + grown
    for name, slots in (
        ("room for all", args.system + (CONVERSATIONS + 1) * grown),
        ("a pool for half", args.system + (CONVERSATIONS + 1) * grown // 2),
    ):
        flags = ["--max-model-len", str(longest), "--max-total-tokens", str(max(slots, longest))]
        with running_server(args.model, *flags, ready_timeout=300) as server:
            turns = asyncio.run(measure(server, system, args.turns))
        report(name, turns, args.system)


if __name__ == "__main__":
    main()
