"""Planes hold what the GGUF rows held, bit for bit: gguf-py's dequantisation of the same bytes is the truth."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from moeserve.kernels.planes import Planes, dequantize, empty_planes, repack, repack_into
from moeserve.models.loading import upload
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization.table import Q4_K, Q6_K
from tests.kernels import weights
from tests.kernels.quantization.plane_bytes import bytes_of
from tests.kernels.weights import FLOAT32_AT, GPU_INTEGERS, GPU_TYPES, MIN_AT, SCALE_AT, random_weights


def test_a_piece_is_read_whole_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left for the last of them."""
    monkeypatch.setattr(upload, "LEAST_PART", 64)
    rng = np.random.default_rng(0)
    with closing(upload.Upload(torch.device("cpu"))) as up:
        up._num_readers = 4
        for size in (1, 63, 64, 65, 1000, 4099):
            piece = rng.integers(0, 256, size, np.uint8)
            assert np.array_equal(up._to_device(piece).numpy(), piece)


@pytest.mark.parametrize("kind", GPU_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(5, 512), (2, 3, 768)])
def test_repack_loses_nothing(kind: weights.Type, shape: tuple[int, ...]) -> None:
    w = random_weights(kind, *shape)
    planes = repack(bytes_of(w), QUANT_TYPES[kind], shape)
    assert torch.equal(dequantize(planes).reshape(shape), w.values())


@pytest.mark.parametrize("kind", GPU_INTEGERS, ids=lambda t: t.name)
def test_every_bit_counts(kind: weights.Type) -> None:
    """All codes, scales and mins at once: random bytes but for the float16 scales."""
    rng = np.random.default_rng(0)
    blocks = weights.random_blocks(rng, kind, (7,), 1024)
    for places in (SCALE_AT, MIN_AT):
        if kind in places:
            weights.set_half(blocks, places[kind], rng.normal(0, 1, blocks.shape[:-1]))
    if kind in FLOAT32_AT:
        weights.set_floats(kind, blocks, rng.normal(0, 1, blocks.shape[:-1]))
    if kind == weights.Type.MXFP4:
        blocks[..., 0] %= 250  # above, gguf-py's float32 overflows
    w = weights.Weights(kind, blocks.reshape(7, -1), 1024)
    assert torch.equal(dequantize(repack(bytes_of(w), QUANT_TYPES[kind], w.shape), 0), w.values())


@pytest.mark.parametrize(
    "kind", [t for t in GPU_TYPES if QUANT_TYPES[t].block_columns <= 32], ids=lambda t: t.name
)
def test_columns_that_fill_no_unit(kind: weights.Type) -> None:
    w = random_weights(kind, 6, 160)
    assert torch.equal(dequantize(repack(bytes_of(w), QUANT_TYPES[kind], w.shape), 0), w.values())


def test_slices_of_rows_fill_a_stack() -> None:
    w = random_weights(weights.Type.Q6_K, 3, 8, 512)
    planes = empty_planes(Q6_K, w.shape, "cpu")
    rows = bytes_of(w).reshape(24, -1)
    for start, end in ((16, 24), (0, 5), (5, 16)):
        repack_into(planes, rows[start:end], start)
    assert torch.equal(dequantize(planes), w.values())
    with pytest.raises(ValueError, match="not of this matrix"):
        repack_into(planes, rows, 1)


def test_size_is_the_files_or_a_little_more() -> None:
    """Bits a weight, where the columns fill whole units: the GGUF's, and a little for unpacked scales."""

    def bits(planes: Planes) -> float:
        return planes.nbytes * 8 / (planes.experts * planes.rows * planes.cols)

    quantised = [row for row in QUANT_TYPES.values() if row.is_quantised and row.gpu]
    sizes = {row: bits(empty_planes(row, (4, 2048), "cpu")) for row in quantised}
    for row in quantised:
        # A short block of NVFP4 repeats the row's scale, which planes hold once for 256 columns.
        least = -0.38 if row.name in ("NVFP4_G64", "NVFP4_G128") else 0
        assert least <= sizes[row] - 8 * row.block_bytes / row.block_columns <= 0.19, row.name
    assert sizes[Q4_K] == 4.625
