"""A scheduler and a real worker: answers with their logprobs, after which nothing is held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing
from moeserve.worker.loading.cpu.load import CpuModel, load_cpu_model
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config
from tests.support.router.router_world import World


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[object]
    finish_reason: str | None


class Told(World):
    """Keeps logprobs, too."""

    def __init__(self, limits: Limits) -> None:
        self.logprobs: dict[int, list[object]] = {}
        super().__init__(limits)

    def _item(self, item: TokensItem) -> None:
        self.logprobs.setdefault(item.id, []).extend(item.logprobs or [])
        super()._item(item)


def load(path: Path, **options: object) -> CpuModel:
    return load_cpu_model(
        small_config(path, device="cpu", threads=2, max_num_seqs=16, **options), lambda *_: None
    )


def serve(
    runner: Runner,
    requests: list[GenerateRequest],
    max_drafts: int,
    during: Callable[[Told, int], None] = lambda *_: None,
    **limits: object,
) -> tuple[dict[int, Answer], LoadReport]:
    """`during` is called after each step, with its number."""
    ready = runner.ready()
    usual = {
        "num_kv_slots": ready.num_kv_slots,
        "slot_kinds": tuple(ready.kv_slot_kinds),
        "max_num_seqs": ready.max_num_seqs,
        "max_model_len": ready.max_model_len,
        "max_num_batched_tokens": 256,
        "max_num_queued_reqs": 100,
        "num_state_slots": ready.num_state_slots,
        "num_window_slots": ready.num_window_slots,
        "window": ready.window,
        "snapshot_spacing": SnapshotSpacing(tail=4, least=16, first=64),
        "max_drafts": max_drafts,
    }
    world = Told(Limits(**(usual | limits)))  # type: ignore[arg-type]
    world.worker = runner  # type: ignore[assignment]
    for message in requests:
        world.add(message)
    for number in range(2000):
        while world.plan() is not None:
            pass
        if not world.in_flight:
            break
        world.result()
        world.check()
        during(world, number)
    world.check_all_free()
    answers = {}
    for id, seen in world.seen.items():
        assert isinstance(seen.final, TokensItem), seen.final
        answers[id] = Answer(seen.tokens, world.logprobs[id], seen.final.finish_reason)
    return answers, world.scheduler.load_report()


def lose_at(*numbers: int, successor: Callable[[], Runner] | None = None) -> Callable[[Told, int], None]:
    """For `serve`: behind these steps the worker is lost with plans in flight. Without a `successor`, the runner stands
    in for its own, as nothing that it has is asked for again."""

    def lose(world: Told, number: int) -> None:
        if number in numbers:
            world.plan()
            world.lose_worker()
            world.lost = False
            if successor is not None:
                world.worker = successor()  # type: ignore[assignment]
            world.scheduler.worker_ready("signal 9", crashed_by_itself=False)
            world._read()

    return lose
