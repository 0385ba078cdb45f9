"""The table of quantization types, held to gguf-py, which is ggml's own specification in Python."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from moeserve.quantization import (
    QUANT_TYPES,
    BitField,
    BlockLayout,
    QuantType,
    StoredScales,
    registered,
    supported_names,
)
from moeserve.quantization.other_types import OTHER_TYPES
from moeserve.quantization.reference import dequantize
from moeserve.quantization.table import Q4_0, Q4_K
from tests.support.models.ggml_types import ggml_sizes, ggml_type, ggml_values

ROWS = list(QUANT_TYPES.values())
row_ids = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.mark.parametrize("row", [row for row in ROWS if row.in_gguf], ids=lambda row: row.name)
def test_names_numbers_and_sizes_are_ggmls(row: QuantType) -> None:
    assert (ggml_type(row.number).name, *ggml_sizes(row.number)) == (
        row.name,
        row.block_columns,
        row.block_bytes,
    )


@row_ids
def test_any_block_has_gguf_pys_values(row: QuantType) -> None:
    """Random bytes but for finite halves; and an exponent whose values are finite."""
    rng = np.random.default_rng(row.number)
    blocks = rng.integers(0, 256, (64, row.block_bytes), np.uint8)
    layout, book = row.layout, row.codebook
    if book is not None:
        halves = rng.normal(0, 1, 64).astype(np.float16)
        if book.has_d:
            blocks[:, :2] = halves[:, None].view(np.uint8)
        else:  # in the highest nibbles of four words
            for word in range(4):
                high = blocks[:, book.octets_at + 2 * word + 1]
                high[...] = high & 15 | (halves.view(np.uint16) >> 4 * word & 15).astype(np.uint8) << 4
    elif layout is None:
        values = rng.normal(0, 1, (64, 8)).astype(np.float32)
        blocks = quants.quantize(values, GGMLQuantizationType(row.number)).view(np.uint8)
    elif layout.halves:
        halves = rng.normal(0, 1, (64, layout.halves)).astype(np.float16)
        blocks[:, layout.halves_at : layout.halves_at + 2 * layout.halves] = halves.view(np.uint8)
    elif layout.stored_scales in (StoredScales.F32, StoredScales.UE4M3_F32):
        blocks[:, :4] = rng.normal(0, 1, (64, 1)).astype(np.float32).view(np.uint8)
    else:
        blocks[:, layout.octets_at] %= 250
    stored = blocks.view(np.dtype(row.float_name)) if row.name in ("F32", "F16") else blocks
    expected = ggml_values(row.number, stored)
    np.testing.assert_array_equal(dequantize(row, blocks), expected.reshape(-1))


def test_every_number_that_ggml_knows_has_a_name() -> None:
    assert not QUANT_TYPES.keys() & OTHER_TYPES.keys()
    for kind in GGMLQuantizationType:
        known = QUANT_TYPES.get(kind) or OTHER_TYPES[kind]
        assert known.name == kind.name


def test_what_to_download_instead_is_a_type_that_is_read() -> None:
    assert {other.instead for other in OTHER_TYPES.values()} <= {row.name for row in ROWS} | {""}


def test_a_registered_row_is_there_only_within() -> None:
    assert Q4_0.layout is not None
    row = dataclasses.replace(Q4_0, name="Q4_TOY", number=999)
    with registered(row):
        assert QUANT_TYPES[999] is row
        with pytest.raises(ValueError, match=r"Q4_TOY \(999\) is in the table already"), registered(row):
            pass
        assert QUANT_TYPES[999] is row
    assert 999 not in QUANT_TYPES


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"halves_at": 2}, "begins at byte"),
        ({"high": BitField(18, 1, 1)}, "take 22 bytes of 18"),
        ({"stored_scales": StoredScales.F16_MIN}, "begins at byte"),
        ({"group": 16}, "32 columns, and scales for 16"),
        ({"low": BitField(2, 16, 4), "high": BitField(18, 1, 8)}, "take 50 bytes"),
    ],
)
def test_a_row_that_does_not_add_up_is_refused(changes: dict[str, object], said: str) -> None:
    assert Q4_0.layout is not None
    layout = dataclasses.replace(Q4_0.layout, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        QuantType("Q4_TOY", 999, 32, 18, layout)


def test_codes_that_no_kernel_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel reads"):
        QuantType("Q1_TOY", 999, 32, 6, BlockLayout(BitField(2, 4, 1), 32, StoredScales.F16, 0))
    with pytest.raises(ValueError, match="a layout, a codebook or, a float"):
        QuantType("NEITHER", 999, 32, 18)


def test_plane_bytes_of_a_k_quant() -> None:
    """Q4_K: 148 bytes for 144, as docs/explanation/planner.md says."""
    assert (Q4_K.row_bytes(256), Q4_K.plane_row_bytes(256)) == (144, 148)


def test_the_readme_lists_them() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    assert f"| Weights | {supported_names()}, " in readme.read_text()
