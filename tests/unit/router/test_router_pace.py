"""The pace of answers while prompts are read, and the fair order among prompts, in virtual time."""

from __future__ import annotations

from functools import cache

import pytest

from moeserve.config import ServerConfig
from moeserve.messages.steps import WorkerReady
from moeserve.router.__main__ import limits
from moeserve.router.core.limits import BESIDE_ANSWERS, STREAMED_PREFILL_SHARE
from moeserve.router.core.policy import pace
from moeserve.router.core.policy.pace import LEAST_CHUNK, SHORT_ODDS, Pace
from moeserve.router.core.policy.step_cost import StepCost, StepShape
from moeserve.router.core.request import SECONDS_PER_PRIORITY
from tests.support.nightly import nightly_after
from tests.support.router.router_world import request
from tests.support.router.virtual_engine import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    Stream,
    StreamingEngine,
    VirtualEngine,
    experts_read,
)

LONG = 16_000


@cache
def alone_ttft(prompt: int) -> float:
    engine = VirtualEngine()
    stream = engine.send(request(0, prompt, 1, arrival=0.0))
    engine.run()
    return stream.ttft


def victim_and_prompt(**limits: object) -> tuple[VirtualEngine, Stream, float, Stream]:
    """A stream that has been decoding alone; its speed in tokens a second; then a long prompt comes."""
    engine = VirtualEngine(**limits)
    victim = engine.send(request(0, 20, 30_000, arrival=0.0))
    engine.run(until=5.0)
    speed = 1.0 / victim.gaps(1.0, 5.0)[len(victim.gaps(1.0, 5.0)) // 2]
    prompt = engine.send(request(1, LONG, 1, arrival=engine.now))
    while prompt.ended is None:
        engine.turn()
    return engine, victim, speed, prompt


def tokens_between(stream: Stream, start: float, end: float) -> int:
    return sum(start <= t < end for t in stream.tokens)


def test_an_answer_keeps_its_pace_while_a_long_prompt_is_read() -> None:
    _, victim, speed, prompt = victim_and_prompt()
    begin, end = prompt.sent, prompt.tokens[0]
    assert tokens_between(victim, begin, end) / (end - begin) > 0.55 * speed
    for second in range(int(begin) + 1, int(end) - 4):
        assert tokens_between(victim, second, second + 3) / 3 > 0.45 * speed, "throughout, not on average"
    assert prompt.ttft < 3.2 * alone_ttft(LONG)


def test_the_share_is_the_users_to_choose() -> None:
    """What the prompt gains the answer loses: one engine serves both."""
    _, victim, speed, prompt = victim_and_prompt(prefill_share=0.7)
    begin, end = prompt.sent, prompt.tokens[0]
    assert tokens_between(victim, begin, end) / (end - begin) < 0.45 * speed
    assert prompt.ttft < 1.9 * alone_ttft(LONG)


def test_prompts_first_fill_every_step() -> None:
    """What a GPU's users expect of throughput; the answer gets a token with each step."""
    engine, victim, _, prompt = victim_and_prompt(prefill_share=1.0)
    assert prompt.ttft < 1.15 * alone_ttft(LONG)
    steps = [step for step in engine.steps if step.prompt_tokens and step.end > prompt.sent]
    full = [
        step.prompt_tokens
        for step in steps
        if step.prompt_tokens >= engine.scheduler.limits.max_num_batched_tokens - 1
    ]
    assert len(full) >= len(steps) - 6  # the first ones grow: nothing was measured
    assert tokens_between(victim, prompt.sent, prompt.tokens[0]) >= len(steps) - 1


def test_a_number_of_the_users_holds_for_steps_with_answers_too() -> None:
    ready = WorkerReady(4096, 8, 4096, 100, 0, 0, "virtual", max_num_batched_tokens=16_384)

    def beside_answers(given: int | None) -> int:
        return limits(ServerConfig(model="m.gguf", max_num_batched_tokens=given), ready).step_tokens(1)

    assert (beside_answers(None), beside_answers(16_384)) == (BESIDE_ANSWERS, 16_384)


def test_steps_are_larger_while_no_answer_waits_for_them() -> None:
    most, beside_answers = 2048, 512
    engine = VirtualEngine(
        prefill_share=1.0,
        max_num_batched_tokens=most,
        most_beside_answers=beside_answers,
        num_kv_slots=65_536,
    )
    for id in range(3):  # the first chunks grow while the cost of a step is unknown
        engine.send(request(id, LONG, 1, arrival=engine.now))
        engine.run()
    alone = len(engine.steps)
    engine.send(request(3, LONG, 1, arrival=engine.now))
    engine.run()
    assert max(step.prompt_tokens for step in engine.steps[alone:]) == most
    engine.send(request(4, 20, 30_000, arrival=engine.now))
    engine.run(until=engine.now + 2.0)
    beside = len(engine.steps)
    prompt = engine.send(request(5, LONG, 1, arrival=engine.now))
    while prompt.ended is None:
        engine.turn()
    assert max(step.prompt_tokens + step.decode_rows for step in engine.steps[beside:]) == beside_answers


@pytest.mark.parametrize("step_tokens", [2048, 8192], ids=["many chunks", "two chunks"])
def test_streamed_prompts_leave_answers_half_of_their_speed(step_tokens: int) -> None:
    """Four answers beside a long prompt that brings the experts in RAM: and it takes about twice its time alone, in
    chunks as large."""
    engine = StreamingEngine(
        prefill_share=STREAMED_PREFILL_SHARE, max_num_batched_tokens=step_tokens, streams_prompts=True
    )
    for id in range(2):  # the first is read before the cost of a step is known
        alone = engine.send(request(id, LONG, 1, arrival=engine.now))
        engine.run()
    answers = [engine.send(request(id, 20, 30_000, arrival=engine.now)) for id in range(2, 6)]
    begin = engine.now
    engine.run(until=begin + 5.0)
    speed = tokens_between(answers[0], begin + 1.0, begin + 5.0) / 4.0
    steps = len(engine.steps)
    prompt = engine.send(request(6, LONG, 1, arrival=engine.now))
    while prompt.ended is None:
        engine.turn()
    for answer in answers:
        kept = tokens_between(answer, prompt.sent, prompt.tokens[0]) / (prompt.tokens[0] - prompt.sent)
        assert kept > 0.49 * speed
    assert prompt.ttft < 2.05 * alone.ttft
    # The first chunk does not wait.
    assert any(step.prompt_tokens for step in engine.steps[steps : steps + 4])
    chunks = [step.prompt_tokens for step in engine.steps[steps:] if step.prompt_tokens]
    assert len(chunks) == -(-LONG // (step_tokens - len(answers)))


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("limit", nightly_after(1, [60.0, 120.0, 250.0]))
def test_a_limit_on_latency_is_kept(limit: float, share: float) -> None:
    _, victim, _, prompt = victim_and_prompt(max_itl_ms=limit, prefill_share=share)
    gaps = victim.gaps(prompt.sent, prompt.tokens[0])
    assert gaps[int(0.99 * len(gaps))] <= limit / 1e3
    stalled = [gap for gap in gaps if gap > 0.03]
    assert sum(gap > limit / 1e3 for gap in stalled) <= 0.12 * len(stalled), (
        "nor do the stalls by themselves break it"
    )


def test_a_step_leaves_a_vision_tower_its_part_of_the_limit() -> None:
    """Until the tower has done."""
    engine = VirtualEngine(max_itl_ms=120.0)
    victim = engine.send(request(0, 20, 30_000, arrival=0.0))
    engine.run(until=5.0)
    gaps: list[float] = []
    for slice_ms, share in ((30.0, 0.1), (0.0, 0.0)):
        engine.scheduler.beside_tower(slice_ms, share)
        prompt = engine.send(request(len(gaps) + 1, LONG // 2, 1, arrival=engine.now))
        while prompt.ended is None:
            engine.turn()
        ordered = victim.gaps(prompt.sent, prompt.tokens[0])
        gaps.append(ordered[int(0.99 * len(ordered))] * 1e3)
    beside, alone = gaps
    assert beside <= 120.0 * 0.9 - 30.0 < alone <= 120.0


def test_a_limit_that_cannot_be_kept_still_lets_prompts_through() -> None:
    engine, _, _, prompt = victim_and_prompt(max_itl_ms=5.0)
    assert prompt.ended is not None
    chunks = [step.prompt_tokens for step in engine.steps if step.end > prompt.sent and step.prompt_tokens]
    assert set(chunks[1:-1]) == {LEAST_CHUNK}


def test_a_prompt_alone_takes_large_steps_but_not_longer_than_a_newcomer_can_wait() -> None:
    engine = VirtualEngine()
    engine.send(request(0, LONG, 1, arrival=0.0))
    engine.run()
    settled = [step for step in engine.steps[2:-1] if step.prompt_tokens]
    assert max(step.ms for step in settled) < 2200
    assert sum(step.prompt_tokens for step in settled) / len(settled) > 200


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = VirtualEngine()
    long = engine.send(request(0, LONG, 1, arrival=0.0))
    engine.run(until=10.0)
    shorts = []
    for id in range(1, 6):
        shorts.append(engine.send(request(id, 200, 1, arrival=engine.now)))
        engine.run(until=engine.now + 3.0)
    assert max(short.ttft for short in shorts) < 2.5
    engine.run()
    assert long.ttft < 1.2 * alone_ttft(LONG) + 5 * alone_ttft(200)


def test_short_prompts_without_end_do_not_starve_a_long_one() -> None:
    """The short ones alone would take more than all of the engine."""
    engine = VirtualEngine(max_num_queued_reqs=100_000)
    long = engine.send(request(0, 8000, 1, arrival=0.0))
    id = 0
    while long.ended is None:
        id += 1
        engine.send(request(id, 200, 1, arrival=engine.now))
        engine.run(until=engine.now + 0.1)
        assert engine.now < 200.0
    assert long.ttft < 5.5 * alone_ttft(8000)


def test_an_urgent_prompt_goes_first_and_the_others_get_there_too() -> None:
    engine = VirtualEngine(max_num_queued_reqs=100_000)
    calm = engine.send(request(0, 2000, 1, arrival=0.0))
    urgent: list[Stream] = []
    while calm.ended is None:
        urgent.append(engine.send(request(len(urgent) + 1, 2000, 1, arrival=engine.now, priority=-1)))
        engine.run(until=engine.now + 3.0)
    assert urgent[0].ended is not None
    assert urgent[0].ended < calm.ended, "passed by the more urgent one"
    assert calm.ttft < SECONDS_PER_PRIORITY + 10 * alone_ttft(2000), "but not for ever"


def test_a_backlog_of_prompts_is_worked_off_rather_than_kept() -> None:
    """Where few answer and many wait, the many get most of the time, whatever the share of one."""
    engine = VirtualEngine(prefill_share=0.1)
    engine.send(request(0, 20, 10_000, arrival=0.0))
    engine.run(until=2.0)
    streams = [engine.send(request(id, 512, 1, arrival=engine.now)) for id in range(1, 33)]
    while any(stream.ended is None for stream in streams):
        engine.turn()
    assert max(stream.ttft for stream in streams) < 3.0 * 32 * alone_ttft(512), (
        "not 10 times: the share of one"
    )


class SlowReadingEngine(VirtualEngine):
    """A CPU whose experts take long to read, as Qwen3.6-35B-A3B's 256 do on two cores."""

    def _ms(self, decode_rows: int, prompt_tokens: int, attended: float) -> float:
        tokens = decode_rows + prompt_tokens
        return 20.0 + 130.0 * experts_read(tokens) + 0.3 * decode_rows + 7.1 * prompt_tokens + 1e-4 * attended


def talks(turns: int = 8, clients: int = 8) -> tuple[float, float, float]:
    """Conversations about one long text, each with a question of 40 tokens and an answer of as many by turns. Returns
    the seconds that they take, the median TTFT of later turns, and the longest gap between two tokens."""
    engine = SlowReadingEngine()
    history = [list(range(1, 2001)) for _ in range(clients)]
    current: dict[int, Stream] = {}
    for client, text in enumerate(history):
        text += [10**6 + client, *range(39)]
        current[client] = engine.send(request(client, text, 40, arrival=engine.now))
    asked = [1] * clients
    ttfts: list[float] = []
    while current:
        engine.turn()
        for client, stream in list(current.items()):
            if stream.ended is None:
                continue
            if asked[client] > 1:
                ttfts.append(stream.ttft)
            history[client] += [7] * 40 + [10**6 + client, *range(39)]
            if asked[client] == turns:
                del current[client]
                continue
            asked[client] += 1
            ident = clients * asked[client] + client
            current[client] = engine.send(request(ident, history[client], 40, arrival=engine.now))
    gaps = [gap for stream in engine.streams.values() for gap in stream.gaps(0.0, engine.now)]
    return engine.now, sorted(ttfts)[len(ttfts) // 2], max(gaps)


def test_later_turns_of_conversations_begin_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a later turn's prompt is cached. Its answer, once begun, shares the reading of the experts with the
    others, so that all end sooner."""
    all_in, ttft, longest = talks()
    monkeypatch.setattr(pace, "SHORT_ODDS", 1.0)
    equal_all_in, equal_ttft, equal_longest = talks()
    assert ttft < 0.6 * equal_ttft
    assert all_in < 0.95 * equal_all_in
    assert longest < 1.1 * equal_longest


def speed_beside_prompts(engine: VirtualEngine, prompt: int) -> float:
    """The speed of an answer beside prompts without end, one at a time, relative to its speed alone."""
    victim = engine.send(request(0, 20, 30_000, arrival=0.0))
    engine.run(until=20.0)
    alone = tokens_between(victim, 10.0, 20.0) / 10.0
    ids = iter(range(1, 10**6))
    running: Stream | None = None
    while engine.now < 120.0:
        if running is None or running.ended is not None:
            running = engine.send(request(next(ids), prompt, 1, arrival=engine.now))
        engine.turn()
    return tokens_between(victim, 40.0, 120.0) / 80.0 / alone


def test_an_answer_beside_short_prompts_without_end_keeps_its_part() -> None:
    assert 0.33 < speed_beside_prompts(SlowReadingEngine(), 40) < 0.45


@pytest.mark.parametrize("actual_ms", [300.0, 500.0, 700.0], ids=["sooner", "as predicted", "later"])
def test_a_short_prompts_odds_hold_whatever_its_step_takes(actual_ms: float) -> None:
    """For how many steps an answer is left alone after a step of 500 ms, 400 of them for a prompt."""
    cost = StepCost(NUM_EXPERTS, EXPERTS_PER_TOKEN)
    for _ in range(8):
        cost.observe(StepShape(rows=1), 100.0)

    def steps_alone(short_ms: float) -> int:
        pace = Pace(cost, None, 0.4)
        charged = pace.planned(1, 100.0, 400.0, 1.0, prompts=1, short_ms=short_ms)
        pace.corrected(500.0, actual_ms, charged)
        steps = 0
        while pace.prefill_budget_ms(1, 1.0, 1.0) == 0.0:
            pace.planned(1, 1.0, 0.0, 1.0, prompts=1)
            steps += 1
        return steps

    earned = 100.0 * 0.4 / 0.6  # by the step itself
    owed = actual_ms - 100.0
    assert steps_alone(0.0) == pytest.approx((owed - earned) * 1.5, abs=2.0)
    assert steps_alone(400.0) == pytest.approx((owed / SHORT_ODDS - earned) * 1.5, abs=2.0)


def test_the_end_of_a_long_prompt_is_no_short_one() -> None:
    """Answers beside prompts of two or three chunks, of which the last is small, keep nearly 0.6 of their speed."""
    assert speed_beside_prompts(SlowReadingEngine(), 400) > 0.57
