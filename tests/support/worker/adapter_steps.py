"""Sequences of different LoRA adapters in the same steps of a runner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from moeserve.messages.sampling import TokenLogprob
from moeserve.worker.runner import Runner
from tests.gpu.driver import SCORED, Driver

DECODED = 3  # tokens behind each prompt


def score_together(
    runner: Runner, prompts: Sequence[list[int]], adapters: Sequence[str], chunk: int
) -> list[list[TokenLogprob]]:
    """What was predicted after each position of each prompt with the adapter of this name ("": the model itself), then
    DECODED tokens, each the next input of all. A step has `chunk` tokens of every prompt left."""
    driver, keys = Driver(runner), runner.ready().adapters | {"": ""}
    new = [
        msgspec.structs.replace(driver.new(slot, prompt, SCORED), adapter=keys[adapter])
        for slot, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    found: list[list[TokenLogprob]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(len(of) < len(prompt) + DECODED for of, prompt in zip(found, prompts, strict=True)):
        rows, owners = [], []
        for slot, prompt in enumerate(prompts):
            if len(found[slot]) >= len(prompt) + DECODED:
                continue
            count = max(1, min(chunk, len(prompt) - done[slot]))
            done[slot] += count
            rows.append(driver.row(slot, count, sample=done[slot] >= len(prompt)))
            owners.append(slot)
        result = driver.step(new, rows)
        new = []
        sampled = iter(result.sampled)
        for row, slot in enumerate(owners):
            found[slot] += result.prompt_logprobs.get(row, [])
            if rows[row].sample:
                token = next(sampled).logprob
                assert token is not None
                found[slot].append(token)
    return found


def top_kl(truth: TokenLogprob, ours: TokenLogprob) -> float:
    """The Kullback-Leibler divergence over the truth's most likely tokens, as far as ours has them, and the rest as
    one."""
    mine = dict(zip(ours.top_ids, ours.top_logprobs, strict=True))
    pairs = [(p, mine[i]) for i, p in zip(truth.top_ids, truth.top_logprobs, strict=True) if i in mine]
    rest = [max(1e-9, 1.0 - sum(math.exp(pair[side]) for pair in pairs)) for side in (0, 1)]
    pairs.append((math.log(rest[0]), math.log(rest[1])))
    return sum(math.exp(p) * (p - q) for p, q in pairs)
