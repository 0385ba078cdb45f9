"""What requests get of a model with windowed layers, through scheduler and worker, with one KV pool or with two."""

from __future__ import annotations

import random
from array import array

from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest
from moeserve.router.core.scheduler import Scheduler
from moeserve.worker.runner import Runner
from tests.support.models.gemma_file import VOCAB
from tests.support.worker.beams import Wanted, requests, scheduler_of, serve

Answer = list[tuple[int, float]]  # tokens, each with its log-probability


def ask(id: int, prompt: list[int], max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        id=id,
        token_ids=array("i", prompt).tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0),
        text=TextOptions(),
        arrival=float(id),
    )


def talk(runner: Runner) -> tuple[Scheduler, dict[int, Answer]]:
    """Two at a time, one that goes on from another's answer, one that departs within a prompt, and a beam search."""
    rng = random.Random(1)
    first = [rng.randrange(VOCAB) for _ in range(30)]
    scheduler = scheduler_of(runner)
    found: dict[int, Answer] = {}

    def take(messages: list[GenerateRequest]) -> None:
        for id, items in serve(scheduler, runner, messages).items():
            pairs = [(one, item.logprobs) for item in items for one in item.token_ids[:1] if item.logprobs]
            found[id] = [(entry.token_id, entry.logprob) for _, of in pairs for entry in of or []]

    take([ask(1, first, 12), ask(2, first[:7], 20)])
    said = [token for token, _ in found[1]]
    take([ask(3, [*first, *said, 3, 1, 4], 8), ask(4, [*first[:26], 9, 9, 9], 12)])
    take(requests(10, first[:20], Wanted(2, 2, 14)))
    return scheduler, found
