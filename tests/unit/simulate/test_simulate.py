"""The simulator: its timeline by hand, what it must conserve, and that it is fast."""

from __future__ import annotations

import heapq
import time

import msgspec
import pytest

from moeserve.cli.simulate.simulation import Simulation, TimeWeightedGauge
from moeserve.cli.simulate.step_time import StepTime
from moeserve.cli.simulate.worker import Timing
from moeserve.cli.workload.metrics import Outcome, concurrency, summarize
from moeserve.cli.workload.shapes import PRESETS, WorkloadShape, generate
from moeserve.cli.workload.trace import Session, Turn, Workload
from moeserve.messages.steps import MeasuredStep
from tests.support.nightly import nightly_after
from tests.support.router.simulation import NOTHING_ELSE, TEN_MS, limits, ms, simulate, single

GROWING = StepTime("grows", [0, 1], [0.010, 0.0105], decode_context=1e-8, prefill_pairs=1e-9)
USUAL = Timing(frontend=0.002, reply=0.001, hop=0.0005, gap=0.0002)


# ---------------------------------------------------------------- the timeline, by hand


def test_a_request_alone() -> None:
    """Prefill and the first token in one step; the plan of the next is there before it ends."""
    result = simulate(single((1.0, 5, 4)))
    (outcome,) = result.outcomes
    assert (ms(outcome.sent), ms(outcome.ttft), ms(outcome.latency)) == (1000, 10, 40)
    assert [ms(gap) for gap in outcome.itls] == [10, 10, 10]
    assert (outcome.prompt_len, outcome.output_len) == (5, 4)
    assert ms(result.duration) == 1040


def test_what_surrounds_a_step() -> None:
    """httpserver 3, hop 1, step 10, hop 1, reply 2. The plans of steps 1 and 2 leave together, so between these stands
    the gap alone, 0.5; step 3 is planned when the result of 1 is there, long before 2 ends."""
    timing = Timing(frontend=0.003, reply=0.002, hop=0.001, gap=0.0005)
    (outcome,) = simulate(single((0, 5, 3)), timing=timing).outcomes
    assert ms(outcome.ttft) == 3 + 1 + 10 + 1 + 2
    assert [ms(gap) for gap in outcome.itls] == [10.5, 10.5]


def test_steps_launched_ahead_follow_without_a_gap() -> None:
    """As above, but where steps of decode rows are launched while the one before is computed: the first is a prompt's,
    and step 3 is planned long before 2 ends. With a hop longer than a step no plan is there in time: the gap is the
    way, and the step takes the launch more."""
    ahead = msgspec.structs.replace(TEN_MS, ahead_tokens=64, launch=0.004)
    timing = Timing(frontend=0.003, reply=0.002, hop=0.001, gap=0.0005)
    (outcome,) = simulate(single((0, 5, 3)), ahead, timing).outcomes
    assert ms(outcome.ttft) == 3 + 1 + 10 + 1 + 2
    assert [ms(gap) for gap in outcome.itls] == [10, 10]
    far = Timing(frontend=0, reply=0, hop=0.020, gap=0.0005)
    (outcome,) = simulate(single((0, 5, 4)), ahead, far).outcomes
    assert [ms(gap) for gap in outcome.itls] == [10, 20 + 20 + 10 + 4 - 10, 10]


def test_chunks_above_what_is_launched_ahead_wait_for_the_host() -> None:
    """Three of 40 tokens, each 0.5 ms behind the one before, or without a gap where 40 may be launched ahead."""
    timing = Timing(frontend=0, reply=0, hop=0, gap=0.0005)
    for most, gaps in ((39, 2), (40, 0)):
        ahead = msgspec.structs.replace(TEN_MS, ahead_tokens=most)
        (outcome,) = simulate(single((1, 120, 1)), ahead, timing, max_num_batched_tokens=40).outcomes
        assert ms(outcome.ttft) == 30 + 0.5 * gaps


def test_the_router_begins_with_what_the_worker_measured() -> None:
    """Seven prompts that come while the first is computed: a router that has seen steps of 256 tokens alone doubles
    their size, one that knows those of 2,048 takes all at once."""
    workload = single((0, 256, 40), *[(0.005, 256, 40)] * 7)
    took = []
    for measured in ([], [MeasuredStep(0, 0, 0, n, 10.0) for n in (64, 256, 2048)]):
        known = msgspec.structs.replace(TEN_MS, measured_steps=measured)
        result = Simulation(
            workload, limits(max_num_batched_tokens=2048, prefill_share=1.0), known, NOTHING_ELSE
        ).run()
        took.append(sorted(ms(outcome.sent + outcome.ttft) for outcome in result.outcomes))
    assert took[1] == [10] + [30] * 7
    assert took[0][-1] > 40


def test_tokens_take_from_a_step_where_cores_are_shared() -> None:
    """Two rows that sample, 1 ms each; a chunk of a prompt samples nothing."""
    shared = Timing(frontend=0, reply=0, hop=0, gap=0, token_cpu=0.001)
    together = simulate(single((0, 5, 3), (0, 5, 3)), timing=shared).outcomes
    assert [ms(gap) for outcome in together for gap in outcome.itls] == [12] * 4
    (chunks,) = simulate(single((0, 100, 1)), timing=shared, max_num_batched_tokens=50).outcomes
    assert ms(chunks.ttft) == 10 + 11


def test_a_newcomer_waits_for_the_two_plans_in_flight() -> None:
    """At 5 ms steps 1 (0 to 10) and 2 (10 to 20) are planned; the next plan is made at 10, and runs 20 to 30."""
    first, second = simulate(single((0, 5, 10), (0.005, 5, 1))).outcomes
    assert ms(second.sent + second.ttft) == 30
    assert [ms(gap) for gap in first.itls] == [10] * 9, "and the first one never stops"


def test_a_request_that_ends_wastes_at_most_one_row() -> None:
    """With max_tokens 9 the row after the stop token is planned before it is known: 3 steps for 2 tokens, where
    max_tokens 2 takes 2."""
    workload = single((0, 5, 2))
    assert simulate(workload).report.steps == 2
    result = simulate(workload, max_tokens=9)
    assert result.report.steps == 3
    assert result.outcomes[0].output_len == 2
    assert ms(result.outcomes[0].latency) == 20


def test_prompts_are_computed_in_chunks() -> None:
    """100 tokens at 40 a step: 3 steps to the first token."""
    (outcome,) = simulate(single((0, 100, 1)), max_num_batched_tokens=40).outcomes
    assert ms(outcome.ttft) == 30


def test_httpserver_takes_requests_one_after_the_other() -> None:
    """Four at once, 3 ms each, before steps of next to no time."""
    instant = StepTime("a microsecond", [0, 1], [1e-6, 1e-6])
    outcomes = simulate(single(*[(0, 5, 1)] * 4), instant, Timing(0.003, 0, 0, 0)).outcomes
    assert [outcome.ttft for outcome in outcomes] == pytest.approx([0.003, 0.006, 0.009, 0.012], abs=1e-5)


def test_no_more_at_once_than_allowed_and_in_order() -> None:
    """However the scheduler orders them: the next is sent the moment that one has ended."""
    outcomes = simulate(single(*[(0, 5, 3)] * 9), max_concurrency=2).outcomes
    assert concurrency(outcomes)[1].max() == 2
    assert sorted(outcome.sent for outcome in outcomes) == [outcome.sent for outcome in outcomes]
    ends = sorted(outcome.end for outcome in outcomes)
    assert [outcome.sent for outcome in outcomes[2:]] == pytest.approx(ends[:-2])


def test_turns_follow_the_answer_and_the_thought() -> None:
    session = Session((Turn(5, 2), Turn(5, 1, think=0.1), Turn(5, 1, not_before=0.5)))
    outcomes = simulate(Workload((session,))).outcomes
    assert [ms(outcome.sent) for outcome in outcomes] == [0, 120, 500]
    assert [outcome.prompt_len for outcome in outcomes] == [5, 12, 18]


def test_longer_contexts_take_longer() -> None:
    slow = StepTime("context", [0, 1], [0.010, 0.010], decode_context=1e-4)
    (outcome,) = simulate(single((0, 100, 3)), slow).outcomes
    assert [ms(gap) for gap in outcome.itls] == [20.1, 20.2]


def test_conversations_of_a_model_with_recurrent_state() -> None:
    """Each later turn continues from the state that the one before left, so that its first token comes soon."""
    turns = (Turn(2000, 60, 0.0), *[Turn(50, 60, 0.0)] * 9)
    workload = Workload(tuple(Session(turns) for _ in range(8)))
    a_token_a_ms = StepTime("ten milliseconds and one a token", [0, 1], [0.010, 0.011])
    result = simulate(workload, a_token_a_ms, num_kv_slots=40_000, num_state_slots=40)
    first = [outcome for outcome in result.outcomes if outcome.prompt_len == 2000]
    later = [outcome for outcome in result.outcomes if outcome.prompt_len > 2000]
    assert (len(first), len(later)) == (8, 72)
    cached = sum(outcome.cached_tokens for outcome in later)
    assert cached >= 0.9 * sum(outcome.prompt_len for outcome in later)
    mean = sum(outcome.ttft for outcome in later) / len(later)
    assert mean <= 0.2 * sum(outcome.ttft for outcome in first) / len(first)
    assert result.report.state_snapshot_hits == 72


# ---------------------------------------------------------------- what must always hold


def crowd(name: str, requests: int = 60, rate: float = 8.0) -> Workload:
    shape = PRESETS[name]
    fields = {field: getattr(shape, field) for field in shape.__slots__}
    return generate(
        WorkloadShape(**(fields | {"range_ratio": 0.5, "long_input_len": 3000})), requests, rate, 0.5, 1
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("max_tokens", nightly_after(1, [600, None]))
def test_every_request_ends_with_its_answer(name: str, max_tokens: int | None) -> None:
    """And the scheduler's own check of its counts passes, which `run` calls at the end."""
    workload = crowd(name)
    result = simulate(workload, GROWING, USUAL, max_tokens=max_tokens)
    assert len(result.outcomes) == workload.num_requests
    assert not any(outcome.error for outcome in result.outcomes)
    wanted = sum(turn.output_len for session in workload.sessions for turn in session.turns)
    assert sum(outcome.output_len for outcome in result.outcomes) == wanted
    assert result.report.generation_tokens == wanted
    assert result.report.num_running == result.report.num_waiting == 0
    for outcome in result.outcomes:
        assert len(outcome.itls) == outcome.output_len - 1
        assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itls))
        assert outcome.ttft > 0.010
    assert result.running.most <= 32
    assert result.kv_slots.most <= 20_000
    assert 0 < result.worker_busy < result.duration


def test_preemptions_and_cached_prefixes_are_the_schedulers_own() -> None:
    """Answers of very different lengths in a pool for a dozen of them; then a long system prompt for everyone."""
    uneven = generate(WorkloadShape(input_len=150, output_len=300, range_ratio=0.95), 60, 4.0, 1.0, 1)
    tight = simulate(uneven, GROWING, USUAL, num_kv_slots=4000, max_model_len=4000, max_tokens=600)
    assert tight.report.preemptions > 10
    assert not any(outcome.error for outcome in tight.outcomes)
    wide = simulate(uneven, GROWING, USUAL, max_tokens=600)
    assert wide.report.preemptions == 0
    assert wide.duration < tight.duration
    assert [o.output_len for o in wide.outcomes] == [o.output_len for o in tight.outcomes]
    shared = generate(
        WorkloadShape(input_len=50, output_len=50, prefix_len=2000, num_turns=10), 80, 2.0, 1.0, 1
    )
    outcomes = simulate(shared, GROWING, USUAL, num_kv_slots=50_000).outcomes
    cached = sum(outcome.cached_tokens for outcome in outcomes) / sum(
        outcome.prompt_len for outcome in outcomes
    )
    assert 0.9 < cached < 0.99


def test_the_same_arguments_give_the_same_result() -> None:
    assert simulate(crowd("multi-turn", 8), GROWING, USUAL) == simulate(
        crowd("multi-turn", 8), GROWING, USUAL
    )
    assert simulate(crowd("random", 10), GROWING, USUAL) != simulate(crowd("random", 10), TEN_MS, USUAL)


def test_refusals_are_failures_with_their_reason() -> None:
    """One that can never fit, and those beyond the queue; a session ends with its first failure."""
    too_long = simulate(Workload((Session((Turn(9000, 5), Turn(5, 5))),)))
    assert [outcome.error != "" for outcome in too_long.outcomes] == [True, True]
    assert "max_model_len" in too_long.outcomes[0].error
    busy = simulate(single(*[(0, 5, 50)] * 40), max_num_seqs=4, max_num_queued_reqs=10)
    # Nothing is bound before all came.
    assert sum("busy" in outcome.error for outcome in busy.outcomes) == 26 + 4
    assert summarize(busy.outcomes, busy.duration, [], {})["completed"] == 10


def test_means_of_gauges_are_over_time() -> None:
    gauge = TimeWeightedGauge()
    gauge.set(2.0, now=1.0)
    gauge.set(6.0, now=3.0)
    assert gauge.mean(4.0) == (0 * 1 + 2 * 2 + 6 * 1) / 4
    assert gauge.most == 6.0


def test_queueing_follows_theory() -> None:
    """One request at a time, one step of 10 ms each, Poisson arrivals at 70% of what can be served: an M/D/1 queue
    waits rho / (2 (1 - rho)) = 1.167 services in the mean. Plans are made ahead, which a queue of one server does
    not see."""
    workload = generate(WorkloadShape(input_len=5, output_len=1), 1_000, 70.0, 1.0, 4)
    result = simulate(workload, max_num_seqs=1, num_kv_slots=100, max_model_len=100)
    mean = sum(outcome.ttft for outcome in result.outcomes) / len(result.outcomes)
    assert mean == pytest.approx(0.010 * (1 + 0.7 / (2 * 0.3)), rel=0.1)


@pytest.mark.slow
def test_a_thousand_users_for_ten_minutes_take_seconds() -> None:
    """Conversations of a dozen turns with half a minute of thought, behind one system prompt, on a fast machine. In
    units of a loop that runs before and after, for what else is at work makes both longer."""
    shape = WorkloadShape(
        input_len=150, output_len=200, range_ratio=0.5, prefix_len=1000, num_turns=12, think_time=30.0
    )
    workload = generate(shape, 12_000, rate=8.0, burstiness=1.0, seed=0)
    fast = StepTime("fast", [1, 64, 256, 2048], [0.006, 0.012, 0.025, 0.080], decode_context=2e-8)
    loops = [seconds_of_a_loop(), seconds_of_a_loop()]
    began = time.process_time()
    result = simulate(
        workload,
        fast,
        USUAL,
        num_kv_slots=1_500_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=32768,
    )
    seconds = time.process_time() - began
    loops += [seconds_of_a_loop(), seconds_of_a_loop()]
    assert not any(outcome.error for outcome in result.outcomes)
    assert result.duration > 500
    loop = sum(loops) / len(loops)
    assert seconds * 600 / result.duration < 110 * loop, f"{seconds:.1f} s, and a loop {loop:.2f} s"


def seconds_of_a_loop() -> float:
    """CPU seconds of Python of the simulator's kind: a heap, a dictionary and short lists."""
    began = time.process_time()
    heap: list[tuple[int, int]] = []
    seen: dict[int, list[int]] = {}
    for number in range(200_000):
        heapq.heappush(heap, (number * 7919 % 10_007, number))
        if len(heap) > 256:
            key, first = heapq.heappop(heap)
            seen[key] = [first, *seen.get(key, ())[:3]]
    return time.process_time() - began


def test_outcomes_compare_by_value() -> None:
    assert Outcome(1.0, 2) == Outcome(1.0, 2), "which the test of determinism relies on"
