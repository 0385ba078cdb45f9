"""Computes the number of recurrent-state slots: one per running sequence, the rest for snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError

# Default share of the memory left after the weights that snapshots take: a quarter of the KV pool's default share.
SNAPSHOT_SHARE_OF_FREE_MEMORY = 0.125
MOST_SNAPSHOTS_PER_SEQUENCE = 4  # default limit; more snapshots hardly find more prefixes


@dataclass(frozen=True, slots=True)
class StateCapacity:
    """`num_slots` is sent as WorkerReady.num_state_slots; `num_bytes` is the memory of all slots."""

    num_slots: int
    num_bytes: int


def state_slots(config: ServerConfig, bytes_per_state: int, free_bytes: int) -> StateCapacity:
    """Returns the state slots that the flags ask for; one state takes `bytes_per_state`. Raises as
    `plan_state_slots`."""
    budget = config.state_snapshot_budget
    of_snapshots = None if budget is None else int(budget * GIB)
    return plan_state_slots(bytes_per_state, config.max_num_seqs, of_snapshots, free_bytes)


def plan_state_slots(
    bytes_per_state: int, max_num_seqs: int, budget_bytes: int | None, free_bytes: int
) -> StateCapacity:
    """Returns the state slots of a model; none if `bytes_per_state` is 0. bytes_per_state: of one sequence, in all
    layers. budget_bytes: memory for snapshots, from --state-snapshot-budget; None: a share of `free_bytes`, the memory
    left after the weights. Raises ConfigError if the running sequences' states or the requested snapshots do not
    fit."""
    if bytes_per_state == 0:
        return StateCapacity(0, 0)
    running = max_num_seqs * bytes_per_state
    if running > free_bytes:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} needs {running / GIB:.1f} GiB for recurrent state, but "
            f"{free_bytes / GIB:.1f} GiB are free after the weights; ask for at most {free_bytes // bytes_per_state}"
        )
    spare = free_bytes - running
    if budget_bytes is None:
        most = max_num_seqs * MOST_SNAPSHOTS_PER_SEQUENCE
        snapshots = min(int(spare * SNAPSHOT_SHARE_OF_FREE_MEMORY) // bytes_per_state, most)
    elif budget_bytes > spare:
        raise ConfigError(
            f"--state-snapshot-budget {budget_bytes / GIB:.1f} does not fit: {spare / GIB:.1f} GiB are free after the "
            f"weights and {running / GIB:.1f} GiB of running sequences' state; lower it, or lower --max-num-seqs"
        )
    else:
        snapshots = budget_bytes // bytes_per_state
    slots = max_num_seqs + snapshots
    return StateCapacity(slots, slots * bytes_per_state)
