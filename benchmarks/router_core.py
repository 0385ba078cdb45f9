"""What the router's core costs: one step (plan, result, messages) by running and waiting requests.

    python -m benchmarks.router_core

No worker and no sockets: tokens are made up. Two kinds of steps: `steady`, where every running request takes one
token; `churn`, where in each step one answer ends and a waiting request with a prompt of its own takes its
place, with all that goes with it: the peak estimate over all running, the prefix tree, eviction.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array

from moeserve.messages.schema import GenerateRequest, Sampled, SamplingParams, StepResult, TextOptions
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler

STOP_TOKEN = 2
PROMPT, MAX_TOKENS = 256, 2048
STEPS = 400


def request(
    id: int, rng: random.Random, prompt: int = PROMPT, max_tokens: int = MAX_TOKENS
) -> GenerateRequest:
    tokens = array("i", [rng.randrange(10, 100_000) for _ in range(prompt)])
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), seed=id)
    return GenerateRequest(id, tokens.tobytes(), sampling, TextOptions(), arrival=float(id))


def step_us(running: int, waiting: int, *, churn: bool) -> list[float]:
    """Microseconds of each step."""
    rng = random.Random(0)
    slots = running * (PROMPT + MAX_TOKENS)
    limits = Limits(slots, running, slots, 2048, 10**6, 10**9, num_experts=128, experts_per_token=8)
    scheduler = Scheduler(limits)
    for id in range(slots // MAX_TOKENS):  # fill the cache: every slot that is taken from here on is evicted
        scheduler.add(request(-1 - id, rng, MAX_TOKENS, 0))
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.step_result(StepResult(plan.step, [], {}, 0.0, 0.0), 0.0)
    for id in range(running + waiting + STEPS):
        scheduler.add(request(id, rng))
    times: list[float] = []
    while len(times) < STEPS:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        settled = scheduler.load_report().num_running == running
        sampled = [Sampled(7) for row in plan.rows if row.sample]
        if churn and settled:
            sampled[rng.randrange(len(sampled))] = Sampled(STOP_TOKEN)
        ms = 10.0 + 0.3 * sum(row.count for row in plan.rows)
        result = StepResult(plan.step, sampled, {}, ms, 0.1)
        resumed = time.perf_counter()
        scheduler.step_result(result, 0.0)
        scheduler.take_messages()
        if settled:
            times.append((planned - start + time.perf_counter() - resumed) * 1e6)
    scheduler.check()
    return times


def main() -> None:
    gc.disable()  # its pauses are other people's garbage
    print(f"{'':<8}{'running':>9}{'waiting':>9}{'median us':>11}{'mean us':>9}{'p95 us':>8}")
    for churn in (False, True):
        for running in (1, 16, 64, 128, 256, 512):
            for waiting in (0, 1000) if running == 256 else (1000,):
                times = step_us(running, waiting, churn=churn)
                mean, p95 = statistics.fmean(times), sorted(times)[int(0.95 * len(times))]
                kind = "churn" if churn else "steady"
                print(
                    f"{kind:<8}{running:>9}{waiting:>9}{statistics.median(times):>11.0f}{mean:>9.0f}{p95:>8.0f}"
                )


if __name__ == "__main__":
    main()
