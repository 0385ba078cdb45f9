"""Builds the plan of a step's sequences that compressed attention reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.kernels.stream_operands import Heads, KeyRings

Int32s = npt.NDArray[np.int32]


def build_compressed_plan(
    plan: _C.CompressedPlan,
    rows: Int32s,
    counts: Int32s,
    positions: Int32s,
    req_slots: Int32s,
    state_slots: Int32s,
    slot_table: Int32s,
    rings: KeyRings,
    heads: Heads,
    threads: int,
    *,
    window: int,
    ratio: int = 0,
    top: int = 0,
) -> None:
    """Fills `plan` with compressed attention. The sequences are given as for `build_attention_plan`, with their states'
    slots: the rings there have the keys of their last tokens. Each row attends to the last `window` tokens with itself,
    and to the entries of complete blocks of `ratio` tokens: to all of them, or with `top` above 0 to at most `top`,
    which `CpuStream.choose_entries` chooses. ratio 0: there are no entries. Only slot_table must outlive the call.
    Raises ValueError for wrong dtypes, shapes or sizes, and IndexError for sequences outside the table or without a
    ring."""
    widths = heads.num, heads.num_kv, heads.dim
    columns = (rows, counts, positions, req_slots, state_slots)
    of_rings = (rings.first, rings.rows, rings.num)
    plan.build(*columns, slot_table, window, ratio, top, *of_rings, *widths, threads)
