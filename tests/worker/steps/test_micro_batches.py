"""A step's rows in parts, one behind the other."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.messages.steps import Row
from moeserve.worker.engines.gpu.steps.micro_batches import split
from moeserve.worker.engines.gpu.steps.step_path import StepFacts, path_of_part
from moeserve.worker.sequences import StepLayout


def row(slot: int, start: int, count: int, first_kv: int, *, sample: bool = True) -> Row:
    kv = np.arange(first_kv, first_kv + count, dtype=np.int32)
    return Row(slot, start, count, kv.tobytes(), sample)


ROWS = [row(0, 7, 1, 0), row(1, 3, 1, 1), row(2, 10, 9, 2), row(3, 0, 6, 11, sample=False)]


@pytest.mark.parametrize("at_most", [1, 2, 3, 4, 8, 11, 16, 17, 100])
def test_parts_together_are_the_step(at_most: int) -> None:
    whole, parts = StepLayout(ROWS), split(ROWS, at_most)
    assert [part.n for part in parts[:-1]] == [at_most] * (len(parts) - 1)
    assert 0 < parts[-1].n <= at_most
    for field in ("position", "kv_slots", "sequence"):
        together = np.concatenate([getattr(part, field) for part in parts])
        assert np.array_equal(together, getattr(whole, field)), field
    begins = np.cumsum([0, *(part.n for part in parts)])
    sampled = [begin + part.sampled_rows for begin, part in zip(begins, parts, strict=False)]
    assert np.array_equal(np.concatenate(sampled), whole.sampled_rows)


def test_a_chunk_that_is_divided_is_sampled_in_its_last_part() -> None:
    first, second = split([row(0, 4, 8, 0)], 5)
    assert (first.start.tolist(), first.count.tolist(), first.sampled_slots.tolist()) == ([4], [5], [])
    assert (second.start.tolist(), second.count.tolist(), second.sampled_slots.tolist()) == ([9], [3], [0])


def test_rows_of_a_small_part_attend_each_by_itself() -> None:
    """As those of a small step: the attention of long prompts leaves no activations for the products of few rows."""
    facts = StepFacts(sizes=(1, 2, 4, 8, 16, 32, 64), max_decode_size=64)

    def alone(rows: list[Row]) -> list[tuple[int, int]]:
        return [(part.n, path_of_part(part.count, part.n, facts).num_decode) for part in split(rows, 32)]

    assert alone([row(0, 0, 40, 0)]) == [(32, 0), (8, 8)]
    assert alone([row(0, 7, 1, 0), row(1, 0, 39, 1)]) == [(32, 1), (8, 8)]
    assert alone([row(slot, 9, 1, slot) for slot in range(20)]) == [(20, 20)]
