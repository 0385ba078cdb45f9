"""Conversations through the router's scheduler and a worker's runner: the same answers, whatever was cached."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import SamplingParams
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing
from moeserve.worker.runner import Runner
from tests.support.router.router_world import World, request

ANSWER = 24  # tokens
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0)
Answers = dict[int, list[int]]  # by request id


def world_of(runner: Runner, **limits: Any) -> World:
    """A scheduler in front of the runner, with these of its `Limits` changed."""
    ready = runner.ready()
    usual: dict[str, Any] = {
        "num_kv_slots": ready.num_kv_slots,
        "slot_kinds": tuple(ready.kv_slot_kinds),
        "max_num_seqs": ready.max_num_seqs,
        "max_model_len": ready.max_model_len,
        "max_num_batched_tokens": 64,
        "max_num_queued_reqs": 100,
        "num_state_slots": ready.num_state_slots,
        "snapshot_spacing": SnapshotSpacing(tail=4, least=16, first=64),
    }
    world = World(Limits(**(usual | limits)))
    world.worker = runner  # type: ignore[assignment]
    for _ in range(200):
        world.scheduler._history.add(2)  # so that answers are predicted to be short
    return world


def converse(runner: Runner, *, system_tokens: int = 100, **limits: Any) -> tuple[Answers, LoadReport]:
    """Four conversations that share a system prompt: two turns, then the second again with another message."""
    world = world_of(runner, **limits)
    rng = random.Random(0)
    vocabulary = min(600, runner.ready().vocab_size)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(length)]

    system = text(system_tokens)
    prompts = [system + text(20) for _ in range(4)]
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            world.add(msgspec.structs.replace(request(10 * turn + number, prompt, ANSWER), sampling=GREEDY))
        world.run()
        world.check_all_free()
        if turn == 0:
            histories = [prompt + world.seen[number].tokens for number, prompt in enumerate(prompts)]
        prompts = [history + text(30) for history in histories]
    return {id: seen.tokens for id, seen in world.seen.items()}, world.scheduler.load_report()
