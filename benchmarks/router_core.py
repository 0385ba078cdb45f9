"""What the router's core costs: one step (plan, result, messages) by running and waiting requests.

    python -m benchmarks.router_core

No worker and no sockets: tokens are made up. Two kinds of steps: `steady`, where every running request takes one
token; `churn`, where in each step one answer ends and a waiting request takes its place, with all that goes with
it: the peak estimate over all running (the pool cannot hold all at full length), the prefix tree, eviction of
what was cached before.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array

from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest
from moeserve.messages.steps import Sampled, StepPlan, StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler

STOP_TOKEN = 2
PROMPT, MAX_TOKENS = 256, 2048
ANSWER = 600  # tokens, as the answers before were, and as the pool can hold of every running request
STEPS = 300


def request(
    id: int, rng: random.Random, prompt: int = PROMPT, max_tokens: int = MAX_TOKENS
) -> GenerateRequest:
    tokens = array("i", [rng.randrange(10, 100_000) for _ in range(prompt)])
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), seed=id)
    return GenerateRequest(id, tokens.tobytes(), sampling, TextOptions(), arrival=float(id))


def finish_all(scheduler: Scheduler, lengths: dict[int, int]) -> None:
    """Runs what there is; request `id` stops after lengths[id] tokens."""
    owners: dict[int, tuple[int, int]] = {}
    while (plan := scheduler.plan(0.0)) is not None:
        for new in plan.new_seqs:
            owners[new.req_slot] = (new.sampling.seed, new.num_prompt)
        sampled = []
        for row in plan.rows:
            id, prompt = owners[row.req_slot]
            done = row.start + row.count - prompt + 1 >= lengths.get(id, MAX_TOKENS)
            sampled += [Sampled(STOP_TOKEN if done else 7)] if row.sample else []
        scheduler.step_result(StepResult(plan.step, sampled, {}, step_ms(plan), 0.1), 0.0)
    scheduler.take_messages()


def step_ms(plan: StepPlan) -> float:
    return 10.0 + 0.3 * sum(row.count for row in plan.rows)


def prepared(running: int, rng: random.Random) -> Scheduler:
    """With a history of answers, and a cache that takes the whole pool."""
    slots = max(running * (PROMPT + 2 * ANSWER), PROMPT + MAX_TOKENS)
    limits = Limits(slots, running, slots, 2048, 10**6, 10**9, num_experts=128, experts_per_token=8)
    scheduler = Scheduler(limits)
    lengths = {-id: rng.randrange(ANSWER // 2, ANSWER) for id in range(1, 1000)}
    for id in lengths:
        scheduler.add(request(id, rng, prompt=1))
    finish_all(scheduler, lengths)
    for id in range(slots // MAX_TOKENS + 1):
        scheduler.add(request(-10_000 - id, rng, MAX_TOKENS, 0))
    finish_all(scheduler, {})
    return scheduler


def step_us(running: int, waiting: int, *, churn: bool) -> list[float]:
    """Microseconds of each step."""
    rng = random.Random(0)
    scheduler = prepared(running, rng)
    for id in range(running + waiting + STEPS * churn):
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
        result = StepResult(plan.step, sampled, {}, step_ms(plan), 0.1)
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
