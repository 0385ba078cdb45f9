"""Slots of the windowed layers' pool, as a bench hands them out."""

from __future__ import annotations

import msgspec
import numpy as np

from moeserve.cli.bench.window_slots import WindowSlots
from tests.support.servers.rpc_child import READY

WINDOW, STEP, SEQUENCES = 4, 10, 3


def test_prompts_of_a_step_each_leave_their_window_alone() -> None:
    """The pool has what a server's would have: each sequence's window, and a step's rows."""
    pool = SEQUENCES * WINDOW + STEP
    slots = WindowSlots(msgspec.structs.replace(READY, window=WINDOW, num_window_slots=pool))
    of_prompt: dict[int, list[int]] = {}
    for seq in range(SEQUENCES):
        of_prompt[seq] = np.frombuffer(slots.take(seq, 0, STEP), np.int32).tolist()
        slots.leave(seq, STEP)
    read = [slot for taken in of_prompt.values() for slot in taken[STEP - WINDOW + 1 :]]
    for seq in range(SEQUENCES):  # one plan: none of them takes what another's row reads
        (slot,) = np.frombuffer(slots.take(seq, STEP, 1), np.int32).tolist()
        assert slot not in read
        read.append(slot)
    assert len(set(read)) == len(read)
