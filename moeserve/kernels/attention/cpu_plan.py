"""Builds the plan of a step's sequences that the C++ attention reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.kernels.choice_rule import ALL_KEYS, ChoiceRule
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
    rule: ChoiceRule = ALL_KEYS,
) -> None:
    """Fills `plan` with the attention of sequences: sequence i has rows rows[i] .. rows[i] + counts[i] - 1 of the step,
    positions from positions[i] on, and KV slots in slot_table[req_slots[i]].

    ends: int32, for each row of the step, the number of its sequence's keys that it sees (`reference.Sequence.ends`);
    None: causal attention. rule: how many of the keys that it sees a row attends to; `CpuStream.choose_keys` chooses
    them. Only slot_table (int32 [max_num_seqs, max_model_len], C order) must outlive the call. Raises ValueError for
    wrong dtypes or shapes, and IndexError for rows, positions or request slots out of range, or for a row that does not
    see itself or sees past its sequence.
    """
    widths = heads.num, heads.num_kv, heads.value_width
    plan.build(
        rows,
        counts,
        positions,
        req_slots,
        slot_table,
        *widths,
        threads,
        ends,
        rule.top,
        rule.block,
        rule.local,
    )
