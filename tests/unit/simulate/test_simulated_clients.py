"""The program that the simulator's clients are: requests that are asked at once leave together."""

from __future__ import annotations

from moeserve.cli.simulate.step_time import StepTime
from moeserve.cli.simulate.worker import Timing
from moeserve.cli.workload.trace import Session, Turn, Workload
from tests.support.router.simulation import ms, simulate, single

INSTANT = StepTime("a nanosecond", [0, 1], [1e-9, 1e-9])
CONNECTS = Timing(frontend=0.002, reply=0, hop=0, gap=0, connect=0.010)


def test_requests_that_come_at_once_leave_when_all_are_connected() -> None:
    """One connection is open. The three others take 10 ms each; then httpserver takes 2 ms for each."""
    outcomes = simulate(single(*[(0, 5, 1)] * 4), INSTANT, CONNECTS).outcomes
    assert [round(ms(outcome.ttft)) for outcome in outcomes] == [2, 32, 34, 36]


def test_those_that_come_meanwhile_are_the_next_round() -> None:
    """Two at 0, of which one finds a connection; two more at 5 ms wait for the round of one, and take 20."""
    outcomes = simulate(
        single((0, 5, 1), (0, 5, 1), (0.001, 5, 1), (0.001, 5, 1)), INSTANT, CONNECTS
    ).outcomes
    # The first has its answer after 2 ms: its connection would be free by then, which nobody waits for.
    assert [round(ms(outcome.sent + outcome.ttft)) for outcome in outcomes] == [2, 12, 32, 34]


def test_a_connection_serves_the_turns_of_a_conversation() -> None:
    turns = (Turn(5, 1), Turn(5, 1), Turn(5, 1))
    outcomes = simulate(Workload((Session(turns), Session(turns))), INSTANT, CONNECTS).outcomes
    assert sorted(round(ms(outcome.ttft)) for outcome in outcomes) == [2, 2, 2, 2, 2, 12]
