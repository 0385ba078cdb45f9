"""Speed with drafts of the model's own next-token block that are right so often, beside none.

    python -m benchmarks.family_file 12-layers.gguf --shape qwen3.6-35b-a3b --layers 12
    python -m benchmarks.draft_speed 12-layers.gguf [--right 0.88 0.7 0.5 0] [--streams 1] [--drafts 3] [--always]

Weights are random, so that the block's own drafts are hardly ever right. It computes them, and then each is replaced:
by the token that the model will choose, with the probability --right if those before it are right, else by another. One
process, a scheduler and two workers on the same weights, one of which drafts, in turns; the texts must be equal. Only
the workers' time of decode steps is counted. Columns: streams; the share of drafts that is right; tokens a second
without drafts and with, the medians of the rounds; their quotient and its lowest and highest; tokens a step and stream;
the median quotient of CPU seconds without drafts and with, of whole answers and of router and worker together, which
other programs disturb less.
--always: without the router's choice of how many drafts there are. --device cuda: `gpu/draft_speed.py`, with weights of
--load-format dummy, and drafts of any origin or, with --block, of the model's own block.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.drafter import Drafter, Wanted
from moeserve.worker.drafts.next_token_drafter import NextTokenDrafter
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, StepLayout
from tests.support.router.router_world import World, request
from tests.support.worker.served_answers import load

PROMPT = 24  # tokens


class Replaced:
    """See `Drafter`. As many drafts as `inner` makes, of which a share is right."""

    def __init__(self, inner: Drafter, tokens: Int32s, texts: Sequence[Sequence[int]], right: float) -> None:
        self.inner = inner
        self._tokens = tokens
        self._texts = texts
        self._right = right
        self._random = random.Random(5)

    def bind(self, slot: int, namespace: str) -> None:
        self.inner.bind(slot, namespace)

    def catch_up(self) -> None:
        self.inner.catch_up()

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        counts = [len(draft) for draft in self.inner.draft(wanted)]
        return [self._replaced(one, count) for one, count in zip(wanted, counts, strict=True)]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        self.inner.computed(layout, accepted)

    def _replaced(self, one: Wanted, count: int) -> Int32s:
        so_far = self._tokens[one.slot, : one.length].tolist()
        text = next(text for text in self._texts if text[: one.length] == so_far)
        true = text[one.length : one.length + count]
        drafts = [token if self._random.random() < self._right else token ^ 1 for token in true]
        return np.array(drafts, np.int32)


class Served(NamedTuple):
    texts: list[list[int]]
    tokens_per_second: float
    tokens_per_step: float  # and stream
    cpu_seconds: float


class Side:
    """A worker and its scheduler, which goes on learning from one call to the next."""

    def __init__(self, runner: Runner, drafts: int) -> None:
        ready = runner.ready()
        self.runner = runner
        self._num_requests = 0
        self._results: list[StepResult] = []
        self._world = World(
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
            ),
            self._step_ms,
        )
        self._world.worker = runner  # type: ignore[assignment]

    def serve(self, prompts: list[list[int]], length: int) -> Served:
        world, first, began = self._world, self._num_requests, time.process_time()
        self._num_requests += len(prompts)
        self._results.clear()
        for id, prompt in enumerate(prompts, first):
            greedy = SamplingParams(max_tokens=length, temperature=0.0, seed=id)
            world.add(replace(request(id, prompt, length), sampling=greedy))
        while True:
            while world.plan() is not None:
                pass
            if not world.in_flight:
                break
            world.result()
        texts = [prompt + world.seen[id].tokens for id, prompt in enumerate(prompts, first)]
        # Neither the steps that have prompts, nor those where some have ended.
        steps = [result for result in self._results[len(prompts) :] if len(result.sampled) == len(prompts)]
        tokens = sum(
            1 + len(one.accepted.token_ids if one.accepted else ())
            for result in steps
            for one in result.sampled
        )
        seconds = sum(result.compute_ms for result in steps) / 1e3
        cpu_seconds = time.process_time() - began
        return Served(texts, tokens / seconds, tokens / len(steps) / len(prompts), cpu_seconds)

    def _step_ms(self, result: StepResult) -> float:
        self._results.append(result)
        return result.compute_ms


def compare(off: Side, on: Side, streams: int, right: float, args: argparse.Namespace) -> str:
    """A row of the table."""
    rng = random.Random(streams)
    prompts = [[rng.randrange(300, 600) for _ in range(PROMPT)] for _ in range(streams)]
    texts = off.serve(prompts, args.tokens).texts
    rows = on.runner._drafts
    assert rows is not None
    drafter = rows._drafter
    inner = drafter.inner if isinstance(drafter, Replaced) else drafter._second  # type: ignore[attr-defined]
    assert isinstance(inner, NextTokenDrafter)
    inner._least = 0.0
    found: list[tuple[Served, Served]] = []
    for _ in range(1 + args.rounds):  # the first one learns
        rows._drafter = Replaced(inner, rows._sequences.tokens, texts, right)
        pair = off.serve(prompts, args.tokens), on.serve(prompts, args.tokens)
        if pair[0].texts != pair[1].texts:
            raise SystemExit("the texts differ")
        found.append(pair)
    del found[0]
    off_s, on_s = (statistics.median(pair[at].tokens_per_second for pair in found) for at in (0, 1))
    quotients = [with_drafts.tokens_per_second / without.tokens_per_second for without, with_drafts in found]
    each = statistics.median(with_drafts.tokens_per_step for _, with_drafts in found)
    spread = f"{min(quotients):.2f} to {max(quotients):.2f}"
    cpu = statistics.median(without.cpu_seconds / with_drafts.cpu_seconds for without, with_drafts in found)
    speeds = f"{off_s:9.1f} {on_s:9.1f} {statistics.median(quotients):6.2f}"
    return f"{streams:7} {right:6.2f} {speeds} {spread} {each:6.2f} {cpu:6.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--right", type=float, nargs="+", default=[0.88, 0.7, 0.5, 0.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--drafts", type=int, default=3, help="most of a row")
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--block", action="store_true", help="with --device cuda: the model's own block drafts"
    )
    parser.add_argument("--num-gpu-experts", type=int, help="with --device cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        from benchmarks.gpu.draft_speed import run  # a machine without a GPU may lack Triton

        run(args)
        return
    if args.always:
        DraftLength.choose = lambda self, records, context, most, budget: (  # type: ignore[method-assign]
            [most] * len(records),
            float(most * len(records)),
        )
    config = json.dumps({"method": "mtp", "num_speculative_tokens": args.drafts})
    model = load(args.model, speculative_config=config)
    on = Side(build_cpu_runner(model), args.drafts)
    without = dataclasses.replace(model.config, speculative_config=None)
    off = Side(build_cpu_runner(dataclasses.replace(model, config=without)), 0)
    print("streams  right  off tok/s  on tok/s on/off      spread a step CPU s")
    for streams in args.streams:
        for right in args.right:
            print(compare(off, on, streams, right, args), flush=True)


if __name__ == "__main__":
    main()
