"""What the C++ attention reads of a step: its sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.kernels.host_arrays import check_array
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
) -> None:
    """Sequence i: rows rows[i] .. +counts[i]-1 of the step, at positions[i] on, KV slots in slot_table[req_slots[i]].

    The arrays need not outlive the call, but for slot_table (int32 [max_num_seqs, max_model_len], C order). Raises
    ValueError as the stream's calls do, and IndexError for rows, positions or request slots beside the table.
    """
    columns = {"rows": rows, "counts": counts, "positions": positions, "req_slots": req_slots}
    for name, column in columns.items():
        check_array(column, name, np.int32)
        if column.shape != (len(rows),):
            raise ValueError(f"{name}: shape {(len(rows),)} wanted, not {column.shape}")
    check_array(slot_table, "slot_table", np.int32)
    if slot_table.ndim != 2:
        raise ValueError(f"slot_table: two dimensions wanted, not {slot_table.ndim}")
    plan.build(
        len(rows),
        rows.ctypes.data,
        counts.ctypes.data,
        positions.ctypes.data,
        req_slots.ctypes.data,
        slot_table.ctypes.data,
        slot_table.shape[0],
        slot_table.shape[1],
        heads.num,
        heads.num_kv,
        heads.value_dim or heads.dim,
        threads,
    )
