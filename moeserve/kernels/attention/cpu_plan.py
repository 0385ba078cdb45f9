"""Builds the plan of a step's sequences that the C++ attention reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.kernels.stream_operands import Heads


def build_attention_plan(
    plan: _C.AttentionPlan,
    rows: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    req_slots: npt.NDArray[np.int32],
    slot_table: npt.NDArray[np.int32],
    heads: Heads,
    threads: int,
    ends: npt.NDArray[np.int32] | None = None,
) -> None:
    """Sequence i: rows rows[i] .. +counts[i]-1 of the step, at positions[i] on, KV slots in slot_table[req_slots[i]].

    ends: int32, for each row of the step, how many of its sequence's keys it sees (`reference.Sequence.ends`); None:
    attention is causal. The arrays need not outlive the call, but for slot_table (int32 [max_num_seqs, max_model_len],
    C order). Raises ValueError as the stream's calls do, and IndexError for rows, positions or request slots beside the
    table, and for a row that does not see itself or sees beyond its sequence.
    """
    widths = heads.num, heads.num_kv, heads.value_width
    plan.build(rows, counts, positions, req_slots, slot_table, *widths, threads, ends)
