"""Speed of a GPU engine with drafts of which a share is right, beside none, by wall clock.

`benchmarks.draft_speed --device cuda` runs it, on a header without weights (`benchmarks.family_file`).

Weights are random, so that no draft is right by itself. So each drafted position is sampled as ever, and then the
token is replaced: with the probability --right by the draft, else by another than the draft. Two workers on one GPU,
one of which drafts, each with a scheduler of its own that chooses how many drafts there are. Columns: streams; the
share of drafts that is right; tokens a second without drafts and with; their quotient; tokens and drafts a step and
stream. --block: the model's own next-token block makes the drafts; else they cost nothing. --always: without the
scheduler's choice.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import StepPlan, StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.engines.engine import SampledAtOnce
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, StepLayout
from tests.gpu.driver import small_config
from tests.support.router.router_world import World, request
from tests.support.worker.launched_ahead import LaunchedAhead

PROMPT = 24  # tokens
MOST_BATCHED = 512  # tokens of a step


class AnyTokens:
    """See `Drafter`. As many drafts as are wanted."""

    def bind(self, slot: int, namespace: str) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        return [np.full(one.most, 7, np.int32) if one.most > 0 else NO_DRAFT for one in wanted]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        pass


def agree(runner: Runner, right: Callable[[], float], *, is_block: bool) -> None:
    """From now on drafts of this runner are right so often. is_block: the model's own block makes them."""
    engine, rows, rng = runner.engine, runner._drafts, np.random.default_rng(5)
    assert isinstance(engine, GpuEngine)
    assert rows is not None
    if is_block:
        rows._drafter._second._least = 0.0  # type: ignore[attr-defined]  # random weights find drafts unlikely
    else:
        rows._drafter = AnyTokens()
    chosen_by, table, lengths = engine.sample_at_once, runner._sequences.tokens, rows.length

    def sample_at_once(logits: Tensor, slots: Int32s, ahead: Int32s) -> Callable[[], SampledAtOnce] | None:
        wait = chosen_by(logits, slots, ahead)
        assert wait is not None

        def replaced() -> SampledAtOnce:
            found = wait()
            rows.take_late()
            drafts = table[slots, np.array([lengths[slot] for slot in slots.tolist()]) + ahead]
            wrong = np.where(found.tokens == drafts, drafts ^ 1, found.tokens)
            return found._replace(tokens=np.where(rng.random(len(slots)) < right(), drafts, wrong))

        return replaced

    engine.sample_at_once = sample_at_once  # type: ignore[method-assign]


class Planned(LaunchedAhead):
    """Its plans have been there in time."""

    def step(self, plan: StepPlan) -> StepResult:
        return replace(super().step(plan), idle_ms=0.0)


class Served(NamedTuple):
    tokens_per_second: float
    tokens_per_step: float  # and stream
    drafts_per_step: float


class Side:
    """A worker and its scheduler, which goes on learning from one call to the next."""

    def __init__(self, runner: Runner, drafts: int) -> None:
        ready = runner.ready()
        self.runner = runner
        self._num_requests = 0
        self._results: list[tuple[float, StepResult]] = []
        worker = Planned(runner)
        self._world = worker.world = World(
            Limits(
                num_kv_slots=ready.num_kv_slots,
                max_num_seqs=ready.max_num_seqs,
                max_model_len=ready.max_model_len,
                max_num_batched_tokens=ready.max_num_batched_tokens,
                max_num_queued_reqs=100,
                num_state_slots=ready.num_state_slots,
                num_experts=ready.num_experts,
                experts_per_token=ready.experts_per_token,
                max_drafts=drafts,
                reuse_prefixes=False,
                prefill_share=1.0,  # so that all requests begin together
            ),
            self._step_ms,
        )
        self._world.worker = worker  # type: ignore[assignment]
        self._world.scheduler.learn(ready.measured_steps)
        self._ended = 0.0

    def serve(self, streams: int, length: int) -> Served:
        world, first = self._world, self._num_requests
        self._num_requests += streams
        self._results.clear()
        rng = random.Random(streams)
        for id in range(first, first + streams):
            sampling = SamplingParams(max_tokens=length, temperature=0.0, seed=id)
            prompt = [rng.randrange(300, 600) for _ in range(PROMPT)]
            world.add(replace(request(id, prompt, length), sampling=sampling))
        self._ended = time.perf_counter()
        while True:
            began = time.perf_counter()
            is_idle = not self.runner.is_under_way or self.runner.is_computed
            while world.plan() is not None:
                pass
            if is_idle:  # another process plans, while the worker's computes
                self._ended += time.perf_counter() - began
            if not world.in_flight:
                break
            world.result()
        # Neither the steps before all requests decode, nor those where a quarter of them have ended.
        rows = [len(result.sampled) for _, result in self._results]
        steps = self._results[rows.index(streams) + 2 :]
        steps = [step for step in steps if len(step[1].sampled) >= 0.75 * streams]
        entries = [one.accepted for _, result in steps for one in result.sampled]
        tokens = sum(1 + (len(one.token_ids) if one else 0) for one in entries)
        drafts = sum(one.drafted if one else 0 for one in entries)
        return Served(
            tokens / sum(seconds for seconds, _ in steps), tokens / len(entries), drafts / len(entries)
        )

    def _step_ms(self, result: StepResult) -> float:
        now = time.perf_counter()
        self._results.append((now - self._ended, result))
        self._ended = now
        return result.compute_ms


def run(args: argparse.Namespace) -> None:
    """args: those of benchmarks.draft_speed."""
    if args.always:
        DraftLength.choose = lambda self, records, context, most, budget: (  # type: ignore[method-assign]
            [most] * len(records),
            float(most * len(records)),
        )
    most = max(args.streams)
    common: dict[str, object] = {
        "load_format": "dummy", "device": "cuda", "max_num_seqs": most, "max_model_len": 512,
        "max_total_tokens": 512 * most, "state_snapshot_budget": 0.0,
        "max_num_batched_tokens": min(PROMPT * most, MOST_BATCHED),
        "num_gpu_experts": args.num_gpu_experts, "gpu_prefill_token_threshold": 1 << 20,
    }  # fmt: skip
    drafts = json.dumps({"method": "mtp" if args.block else "ngram", "num_speculative_tokens": args.drafts})
    off = Side(load_runner(small_config(args.model, **common), lambda *_: None), 0)
    on = Side(
        load_runner(small_config(args.model, speculative_config=drafts, **common), lambda *_: None),
        args.drafts,
    )
    share = 0.0
    agree(on.runner, lambda: share, is_block=args.block)
    print(on.runner.ready().device)
    print("streams  right  off tok/s  on tok/s  on/off  tokens  drafts a step")
    for streams in args.streams:
        for share in args.right:
            on.serve(streams, args.tokens)  # learns
            pairs = [
                (off.serve(streams, args.tokens), on.serve(streams, args.tokens)) for _ in range(args.rounds)
            ]
            without, found = (max(pair[at].tokens_per_second for pair in pairs) for at in (0, 1))
            last = pairs[-1][1]
            print(
                f"{streams:7} {share:6.2f} {without:10.1f} {found:9.1f} {found / without:7.2f} "
                f"{last.tokens_per_step:7.2f} {last.drafts_per_step:7.2f}",
                flush=True,
            )
