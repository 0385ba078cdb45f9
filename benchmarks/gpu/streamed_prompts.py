"""A long prompt that brings experts in RAM to the GPU, beside answers under way: what each costs the other.

    python -m benchmarks.gpu.streamed_prompts model.gguf --slots 64     # a header suffices: family_file

The router's scheduler and the worker's runner in one process. Kept is an answer's rate from the prompt's arrival to its
first token, as a share of its rate without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path

from moeserve.cli.bench.engine import TerminalBar
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest, TokensOut
from moeserve.messages.steps import StepPlan, StepResult
from moeserve.router.__main__ import limits
from moeserve.router.core.scheduler import Scheduler
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner

IDS = range(1000, 20_000)
ANSWER = 8000  # tokens at most
ALONE_S = 3.0  # for which the answers run before the prompt comes


class Loop:
    """Drives one scheduler and one worker, and notes when tokens come."""

    def __init__(self, runner: Runner, config: ServerConfig, share: float | None) -> None:
        ready = runner.ready()
        self._runner = runner
        self.scheduler = Scheduler(limits(dataclasses.replace(config, prefill_share=share), ready))
        self.scheduler.learn(ready.measured_steps)
        self.times: dict[int, list[float]] = {}
        self.chunks: list[int] = []  # prompt tokens of each step that has any
        self._in_flight: deque[StepPlan] = deque()
        self._rng = random.Random(0)

    def ask(self, prompt: int, answer: int) -> int:
        """Returns the request's id."""
        id = len(self.times)
        tokens = array("i", [self._rng.choice(IDS) for _ in range(prompt)]).tobytes()
        sampling = SamplingParams(max_tokens=answer, temperature=0.0)
        self.times[id] = []
        self.scheduler.add(
            GenerateRequest(
                id=id, token_ids=tokens, sampling=sampling, text=TextOptions(), arrival=time.monotonic()
            )
        )
        return id

    def until_first_token(self, id: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        while not self.times[id]:
            self._step()
        return time.perf_counter() - began

    def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._step()

    def rate(self, id: int, begin: float, end: float) -> float:
        return sum(begin <= t < end for t in self.times[id]) / (end - begin)

    def _step(self) -> None:
        while (plan := self.scheduler.plan(time.monotonic())) is not None:
            self._in_flight.append(plan)
        result = self._launch(self._in_flight.popleft()) if self._in_flight else self._finished()
        if result is not None:
            self.scheduler.step_result(result, time.monotonic())
        now = time.perf_counter()
        for message in self.scheduler.take_messages():
            for item in message.items if isinstance(message, TokensOut) else ():
                self.times[item.id].extend([now] * len(item.token_ids))

    def _launch(self, plan: StepPlan) -> StepResult | None:
        """Behind the step under way, as a server does; that one's result, if there is one."""
        prompt = sum(row.count for row in plan.rows if row.count > 1)
        self.chunks += [prompt] if prompt else []
        if self._runner.may_follow(plan):
            result: StepResult | None = self._runner.advance(plan)
            self._runner.launch_rest()
            return result
        result = self._finished()
        self._runner.start(plan)
        return result

    def _finished(self) -> StepResult | None:
        return self._runner.finish() if self._runner.is_under_way else None


def measure(runner: Runner, config: ServerConfig, share: float | None, prompt: int, answers: int) -> str:
    """share: None: the default of this engine."""
    loop = Loop(runner, config, share)
    alone = min(loop.until_first_token(loop.ask(prompt, 1)) for _ in range(2))
    under_way = [loop.ask(20, ANSWER) for _ in range(answers)]
    loop.run(ALONE_S)
    now = time.perf_counter()
    speeds = [loop.rate(id, now - ALONE_S + 1.0, now) for id in under_way]
    loop.chunks.clear()
    beside = loop.until_first_token(loop.ask(prompt, 1))
    kept = [loop.rate(id, now, now + beside) / speed for id, speed in zip(under_way, speeds, strict=True)]
    times = loop.times[under_way[0]]
    gaps = [b - a for a, b in pairwise(times) if b > now]
    name = "default" if share is None else share
    return (
        f"share {name}: prompt of {prompt} alone {alone:.2f} s, beside {answers} answers {beside:.2f} s "
        f"({beside / alone:.2f}x); answers {sum(speeds):.0f} tok/s, kept {min(kept):.0%} to {max(kept):.0%}, longest "
        f"gap {max(gaps) * 1e3:.0f} ms; chunks {loop.chunks}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, default=64, help="of a layer")
    parser.add_argument("--prompt", type=int, default=16_000)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="beside the default")
    args = parser.parse_args()
    config = resolve(
        ServerConfig(
            model=str(args.model), load_format="dummy", device="cuda", num_gpu_experts=args.slots, max_num_seqs=8,
            max_model_len=args.prompt + ANSWER, max_total_tokens=3 * args.prompt, prefix_cache="off",
        )
    )  # fmt: skip
    runner = load_runner(config, TerminalBar())
    print(runner.ready().device, flush=True)
    for share in (None, *args.shares):
        print(measure(runner, config, share, args.prompt, args.answers), flush=True)


if __name__ == "__main__":
    main()
