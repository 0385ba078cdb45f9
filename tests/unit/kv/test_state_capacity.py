"""How many states of recurrent layers fit: the running sequences' first, then snapshots."""

from __future__ import annotations

import pytest

from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.state_capacity import StateCapacity, plan_state_slots

STATE = 64 << 20


def test_a_model_without_recurrent_state_has_no_slots() -> None:
    assert plan_state_slots(0, 64, None, 0) == StateCapacity(0, 0)


@pytest.mark.parametrize(("budget", "snapshots"), [(0, 0), (STATE - 1, 0), (STATE, 1), (GIB, 16)])
def test_the_budget_is_for_snapshots_alone(budget: int, snapshots: int) -> None:
    slots = plan_state_slots(STATE, 8, budget, 4 * GIB)
    assert slots == StateCapacity(8 + snapshots, (8 + snapshots) * STATE)


def test_by_default_snapshots_take_an_eighth_of_what_is_left() -> None:
    assert plan_state_slots(STATE, 16, None, 5 * GIB).num_slots == 16 + 8


def test_by_default_there_are_four_a_sequence_at_most() -> None:
    assert plan_state_slots(STATE, 16, None, 500 * GIB).num_slots == 5 * 16


def test_running_states_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs 64 needs 4\.0 GiB .* at most 47"):
        plan_state_slots(STATE, 64, None, 3 * GIB - 1)


def test_a_budget_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--state-snapshot-budget 2\.0 does not fit: 1\.0 GiB"):
        plan_state_slots(STATE, 16, 2 * GIB, 2 * GIB)
