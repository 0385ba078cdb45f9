"""The C++ engine's list of quantization types and Python's table say the same."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.kernels import _C
from moeserve.quantization import QUANT_TYPES, BitField, QuantType
from moeserve.quantization.codebook import ByteRun, Codebook
from moeserve.quantization.quant_type import Trits

THERE = {row.number: row for row in _C.quant_types()}
HERE = {row.number: row for row in QUANT_TYPES.values() if row.cpu}


def test_both_have_the_same_types() -> None:
    assert {n: row.name for n, row in THERE.items()} == {n: row.name for n, row in HERE.items()}
    assert len(THERE) == len(_C.quant_types())


@pytest.mark.parametrize("row", HERE.values(), ids=lambda row: row.name)
def test_rows_agree(row: QuantType) -> None:
    there, layout = THERE[row.number], row.layout
    assert (there.name, there.block_columns, there.block_bytes, there.is_quantised) == (
        row.name,
        row.block_columns,
        row.block_bytes,
        row.is_quantised,
    )
    if row.codebook is not None:
        _assert_books_agree(row.codebook, there)
        return
    if layout is None:
        return
    if isinstance(layout.low, Trits):
        assert there.trits == [(run.at, run.width, run.digits) for run in layout.low.runs]
    else:
        assert (there.low, there.trits) == (_tuple(layout.low), [])
    assert there.high[2] == layout.high_bits
    if layout.high is not None:
        assert there.high == _tuple(layout.high)
    assert (there.group, there.stored_scales) == (layout.group, layout.stored_scales)
    assert there.octets == layout.octets
    if layout.halves:
        assert there.halves_at == layout.halves_at
    if layout.octets:
        assert there.octets_at == layout.octets_at
    assert (there.offset, there.e4m3) == (layout.offset, layout.e4m3)
    assert tuple(there.levels) == (() if layout.table is None else layout.table.levels)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("IQ3_XXS", np.arange(1024) % 9, "too many distinct magnitudes"),
        ("IQ2_XXS", np.arange(2048) % 5, "too many distinct magnitudes"),
        ("IQ1_S", np.full(16384, 2), "a number that no kernel multiplies"),
        ("IQ3_S", np.full(2048, 16), "a number that no kernel multiplies"),
        ("IQ3_S", np.ones(2047), "another number of them"),
        ("Q4_K", np.ones(2048), "has no codebook"),
    ],
)
def test_entries_that_a_kernel_could_not_look_up_are_refused(
    name: str, entries: np.ndarray, message: str
) -> None:
    number = next(row.number for row in HERE.values() if row.name == name)
    with pytest.raises(ValueError, match=message):
        _C.set_codebook(number, entries.astype(np.int8))


def _assert_books_agree(book: Codebook, there: _C.QuantType) -> None:
    assert there.book == (
        (
            book.entries,
            book.columns,
            book.most,
            book.high_bits,
            int(book.signs),
            int(book.scales),
            book.eighths,
        ),
        *(_run(run) for run in (book.low, book.word, book.high)),
    )
    assert (there.group, there.octets_at, there.octets) == (book.group, book.octets_at, book.octets)


def _run(run: ByteRun | None) -> tuple[int, int, int]:
    return (0, 0, 1) if run is None else (run.at, run.group, run.step)


def _tuple(field: BitField) -> tuple[int, int, int]:
    return field.at, field.width, field.bits
