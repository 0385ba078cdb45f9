"""A plan's rows as arrays, and what becomes of the tokens that were chosen for them."""

from __future__ import annotations

import numpy as np

from moeserve.kernels.sampling.cpu import NONE_ALLOWED
from moeserve.messages.steps import Row
from moeserve.worker.sequences import NO_TOKEN_ALLOWED, Sequences, StepLayout, entries


def row(slot: int, start: int, count: int, *, sample: bool = True) -> Row:
    return Row(slot, start, count, np.arange(count, dtype=np.int32).tobytes(), sample)


FIELDS = ("req_slot", "start", "count", "offset", "sequence", "position", "sampled_slots", "sampled_rows",
          "sampled_positions")  # fmt: skip


def columns(rows: list[Row]) -> dict[str, list[int]]:
    layout = StepLayout(rows)
    for name in FIELDS:
        assert getattr(layout, name).dtype == np.int32
        assert getattr(layout, name).flags.c_contiguous
    return {name: getattr(layout, name).tolist() for name in FIELDS} | {"n": [layout.n]}


def test_rows_of_a_token_and_of_several() -> None:
    assert columns([row(4, 9, 1), row(1, 0, 3, sample=False), row(0, 5, 2)]) == {
        "n": [6],
        "req_slot": [4, 1, 0],
        "start": [9, 0, 5],
        "count": [1, 3, 2],
        "offset": [0, 1, 4],
        "sequence": [4, 1, 1, 1, 0, 0],
        "position": [9, 0, 1, 2, 5, 6],
        "sampled_slots": [4, 0],
        "sampled_rows": [0, 5],
        "sampled_positions": [10, 7],
    }


def test_rows_of_a_token_alone() -> None:
    assert columns([row(4, 9, 1), row(1, 0, 1, sample=False), row(0, 5, 1)]) == {
        "n": [3],
        "req_slot": [4, 1, 0],
        "start": [9, 0, 5],
        "count": [1, 1, 1],
        "offset": [0, 1, 2],
        "sequence": [4, 1, 0],
        "position": [9, 0, 5],
        "sampled_slots": [4, 0],
        "sampled_rows": [0, 2],
        "sampled_positions": [10, 6],
    }


def test_a_token_behind_the_context_has_no_place() -> None:
    sequences = Sequences(3, 8)
    slots, positions = np.array([0, 1, 2], np.int32), np.array([7, 8, 3], np.int32)
    sequences.append(slots, positions, np.array([5, 6, -1], np.int32))
    assert sequences.tokens[0].tolist() == [0] * 7 + [5]
    assert sequences.tokens[1:].tolist() == [[0] * 8] * 2
    sequences.append(slots[:1], positions[:1] - 1, np.array([9], np.int32))
    assert sequences.tokens[0].tolist() == [0] * 6 + [9, 5]


def test_a_row_that_no_token_is_allowed_for_says_so() -> None:
    tokens = np.array([3, NONE_ALLOWED, NONE_ALLOWED, 7], np.int32)
    found = entries(tokens, [None] * 4, {2: "the grammar failed"}, {3})
    assert [entry.error for entry in found] == [None, NO_TOKEN_ALLOWED, "the grammar failed", None]
    assert [entry.token_id for entry in found] == [3, -1, -1, -1]
    assert [entry.late for entry in found] == [False, False, False, True]
