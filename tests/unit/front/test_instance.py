"""How long a model's server may answer nothing before the front gives it up."""

from __future__ import annotations

from moeserve.front.instance import MOST_SILENCES, most_silent_s


def test_a_slow_machine_has_time_to_start_a_process_again() -> None:
    """A server that took 50 s to load, with --step-timeout 4, was killed while its HTTP process started for 25 s; two
    such kills, and the model counted as failed."""
    assert most_silent_s(4.0, 50.0) > MOST_SILENCES * 4.0 + 25.0


def test_one_that_hangs_for_good_is_given_up_in_bounded_time() -> None:
    assert most_silent_s(60.0, 2.0) < 300.0
