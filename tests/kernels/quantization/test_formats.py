"""Every weight format against gguf-py, which is ggml's own specification in Python."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels import _C
from moeserve.kernels.codebooks import bring_codebook
from tests.kernels.operations import stream_of
from tests.kernels.weights import (
    FLOAT32_AT,
    MIN_AT,
    SCALE_AT,
    SPREAD_SCALE_AT,
    TYPES,
    dequantize,
    random_blocks,
    random_weights,
    set_floats,
    set_half,
    set_spread_half,
)

type_name = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


def dequantized_row(kind: Type, row: npt.NDArray[np.uint8], cols: int) -> npt.NDArray[np.float32]:
    row, out = np.ascontiguousarray(row), np.empty(cols, np.float32)
    _C.dequantize_row(int(kind), row.ctypes.data, cols, out.ctypes.data)
    return out


def assert_same_bits(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """NaN equals NaN, whatever its payload; -0 and 0 are equal too, since gguf-py's integers have no -0."""
    np.testing.assert_array_equal(got, expected)


@type_name
def test_any_bytes_dequantise_to_gguf_pys_values(kind: Type) -> None:
    """Bit for bit, on blocks that no quantiser would write: scales of every finite size, either sign, subnormal."""
    rng = np.random.default_rng(kind)
    rows, cols = 40, 512
    blocks = random_blocks(rng, kind, (rows,), cols)
    for at in [table[kind] for table in (SCALE_AT, MIN_AT) if kind in table]:
        finite = rng.integers(0, 0x7C00, blocks.shape[:-1], np.uint16)
        sign = rng.integers(0, 2, blocks.shape[:-1], np.uint16) << 15
        set_half(blocks, at, (finite | sign).view(np.float16))
    if kind in SPREAD_SCALE_AT:
        set_spread_half(blocks, SPREAD_SCALE_AT[kind], rng.normal(0, 1, blocks.shape[:-1]))
    if kind in FLOAT32_AT:
        set_floats(kind, blocks, rng.normal(0, 1, blocks.shape[:-1]))
    bring_codebook(kind)
    stored = blocks.reshape(rows, -1)
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # signalling NaNs of F16, the largest exponent of MXFP4
        expected = dequantize(kind, stored)
    for row, values in zip(stored, expected, strict=True):
        assert_same_bits(dequantized_row(kind, row, cols), values)


@type_name
def test_quantised_gaussian_data_dequantises_alike(kind: Type) -> None:
    bring_codebook(kind)
    weights = random_weights(kind, 5, 768)
    for row, values in zip(weights.rows, weights.values().numpy(), strict=True):
        assert_same_bits(dequantized_row(kind, row, 768), values)


@type_name
def test_embedding_looks_rows_up(kind: Type) -> None:
    table = random_weights(kind, 50, 256)
    ids = torch.tensor([49, 0, 7, 7, 31, 1, 48], dtype=torch.int32)
    x = torch.full((8, 256), 7.0)
    stream = stream_of("plain", 3)
    stream.embed(table.rows, int(kind), ids, 7, x)
    stream.wait()
    assert torch.equal(x[:7], table.values()[ids.long()])
    assert (x[7] == 7.0).all()


@pytest.mark.parametrize("bad", [-1, -(2**31), 50, 2**31 - 1])
def test_an_id_that_is_no_row_is_refused(bad: int) -> None:
    table, x = random_weights(Type.F32, 50, 256), torch.full((2, 256), 7.0)
    stream = stream_of("plain", 3)
    with pytest.raises(IndexError, match=rf"token id {bad} is not in \[0, 50\)"):
        stream.embed(table.rows, int(Type.F32), torch.tensor([3, bad], dtype=torch.int32), 2, x)
    stream.wait()
    assert (x == 7.0).all()


@type_name
def test_a_packed_matrix_takes_exactly_the_files_bytes(kind: Type) -> None:
    """32 rows fill a panel; rows that are missing from the last one are the only overhead."""
    stream = stream_of("plain")
    assert random_weights(kind, 64, 256).pack(stream).bytes == random_weights(kind, 64, 256).rows.nbytes
    ragged = random_weights(kind, 3, 33, 256).pack(stream)
    assert (ragged.experts, ragged.rows, ragged.cols) == (3, 33, 256)
    assert ragged.bytes == 3 * random_weights(kind, 64, 256).rows.nbytes


def test_what_cannot_be_packed_is_refused() -> None:
    stream, source = stream_of("plain"), np.zeros(4096, np.uint8)
    for kind, shape in ((Type.Q8_K, (1, 256)), (Type.I32, (1, 256)), (-1, (1, 256)), (999, (1, 256))):
        with pytest.raises(ValueError, match="unsupported type"):
            stream.pack(source, int(kind), shape)
    with pytest.raises(ValueError, match="ragged row"):
        stream.pack(source, int(Type.Q4_K), (1, 128))
