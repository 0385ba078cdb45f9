"""Which part of the experts in RAM a step streams: what is measured, and what follows from it."""

from __future__ import annotations

import itertools

import pytest

from moeserve.worker.engines.gpu.measure.calibration import calibrate
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming

SIZES = [64, 128, 256, 512, 1024]


class Machine:
    """The CPU takes 1 ms a token, and `waiting` seconds for each step that it has a part in; the stream `fixed` seconds
    and 0.05 ms a token; both at once as long as the longer, and `friction` times as long. Knows what it was asked."""

    def __init__(self, fixed: float, friction: float = 1.0, waiting: float = 0.0) -> None:
        self.fixed = fixed
        self.friction = friction
        self.waiting = waiting
        self.asked: list[tuple[int, float]] = []

    def __call__(self, tokens: int, part: float) -> float:
        self.asked.append((tokens, part))
        on_cpu = self.waiting * (part < 1) + 1e-3 * tokens * (1 - part)
        streamed = (self.fixed + 5e-5 * tokens) * part
        return max(on_cpu, streamed) * (self.friction if 0 < part < 1 else 1.0)


@pytest.mark.parametrize("fixed", [0.1, 0.2, 0.3, 0.5])
def test_threshold_is_where_lines_cross(fixed: float) -> None:
    assert calibrate(Machine(fixed), SIZES).threshold == pytest.approx(fixed / 0.95e-3, abs=1)


@pytest.mark.parametrize("waiting", [0.0, 0.03])
def test_both_ways_end_together(waiting: float) -> None:
    machine = Machine(0.3, waiting=waiting)
    streaming = calibrate(machine, SIZES).streaming
    for tokens in SIZES:
        part = streaming.part(tokens)
        around = [machine(tokens, part + d) for d in (-0.02, 0.0, 0.02)]
        assert machine(tokens, part) <= 1.03 * min(around)
        assert machine(tokens, part) < 0.92 * min(machine(tokens, 0.0), machine(tokens, 1.0))
    parts = [streaming.part(tokens) for tokens in range(1, 4096)]
    assert parts == sorted(parts)
    assert max(b - a for a, b in itertools.pairwise(parts[64:])) < 0.01  # no jumps
    assert (parts[0], parts[-1]) == (0.0, 1.0)


def test_shares_nothing_where_that_is_slower() -> None:
    found = calibrate(Machine(0.2, friction=3.0), SIZES)
    assert found.threshold == 211
    assert [found.streaming.part(n) for n in (1, 64, 210, 211, 9000)] == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert found.described() == "streamed to steps of 211 tokens on"


def test_always_and_never() -> None:
    always = calibrate(lambda tokens, part: 1.0 - part, SIZES)
    assert (always.threshold, always.streaming.part(64)) == (64, 1.0)
    never = calibrate(lambda tokens, part: 0.01 + part, SIZES)
    assert never.threshold is None
    assert [never.streaming.part(n) for n in (1, 64, 5000)] == [0.0, 0.0, 0.0]
    assert never.described() == "never streamed"
    assert calibrate(Machine(0.3), []).streaming == Streaming()


def test_the_ready_line_says_what_was_found() -> None:
    said = calibrate(Machine(0.3), SIZES).described()
    assert said == "streamed to steps of 64 tokens on, in part at first; alone it is faster from 316 on"


def test_the_cpu_is_not_timed_beyond_the_crossing() -> None:
    machine = Machine(0.15)
    calibrate(machine, SIZES)
    assert [tokens for tokens, part in machine.asked if part == 0.0] == [64, 128, 256]


def test_a_threshold_that_is_given_is_a_switch() -> None:
    streaming = Streaming.from_tokens(300)
    assert [streaming.part(n) for n in (1, 299, 300, 9000)] == [0.0, 0.0, 1.0, 1.0]
