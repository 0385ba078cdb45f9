"""Panels of the CPU pool become the planes that the GGUF rows become: in torch, and by the GPU's kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.planes import Planes, dequantize, empty_planes, repack
from moeserve.kernels.planes.from_panels import panels_to_planes
from moeserve.kernels.planes.panels_triton import unpack_panels, unpack_scattered
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization.table import Q4_K
from tests.kernels.weights import GPU_TYPES, Type, random_blocks, random_weights


def bytes_of(matrix: Matrix) -> torch.Tensor:
    at = (ctypes.c_uint8 * matrix.bytes).from_address(matrix.address)
    return torch.from_numpy(np.ctypeslib.as_array(at))


@pytest.mark.parametrize("kind", GPU_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(3, 64, 512), pytest.param((2, 32, 768), marks=pytest.mark.slow)])
def test_all_types(kind: Type, shape: tuple[int, ...]) -> None:
    stream = CpuStream(1)
    w = random_weights(kind, *shape)
    check(stream, kind, np.ascontiguousarray(w.rows), shape)


@pytest.mark.parametrize(
    "kind", [t for t in GPU_TYPES if QUANT_TYPES[t].block_columns == 32], ids=lambda t: t.name
)
def test_columns_that_fill_no_unit(kind: Type) -> None:
    shape = (2, 32, 160)
    w = random_weights(kind, *shape)
    stream = CpuStream(1)
    matrix = w.pack(stream)
    found = empty_planes(QUANT_TYPES[kind], shape, "cpu")
    panels_to_planes(bytes_of(matrix), found)
    assert torch.equal(dequantize(found), w.values())
    check_kernels(matrix, found)


@pytest.mark.parametrize(
    "kind", [t for t in GPU_TYPES if QUANT_TYPES[t].block_columns > 1], ids=lambda t: t.name
)
def test_every_bit(kind: Type) -> None:
    blocks = random_blocks(np.random.default_rng(0), kind, (2, 32), 512)
    check(CpuStream(1), kind, np.ascontiguousarray(blocks).reshape(2, 32, -1), (2, 32, 512))


def check(stream: CpuStream, kind: Type, rows: np.ndarray, shape: tuple[int, ...]) -> None:
    matrix = stream.pack(rows, int(kind), shape)
    expected = repack(torch.from_numpy(rows), QUANT_TYPES[kind], shape)
    found = empty_planes(QUANT_TYPES[kind], shape, "cpu")
    for tensor in own_tensors(found):
        tensor.view(torch.uint8).fill_(0xAB)
    panels_to_planes(bytes_of(matrix), found)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.supers, expected.supers)
    check_kernels(matrix, expected)


def own_tensors(planes: Planes) -> list[torch.Tensor]:
    """Without a codebook, which all matrices of the type share."""
    own = [planes.codes, planes.scales]
    return own if planes.type.plane_book is not None else [*own, planes.supers]


def check_kernels(matrix: Matrix, expected: Planes) -> None:
    """All experts but the last, which stays as it was."""
    shape = (expected.experts, expected.rows, expected.cols)
    found = empty_planes(expected.type, shape, DEVICE)
    tensors = own_tensors(found) if expected.quantised else [found.codes]
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xAB)
    unpack_panels(bytes_of(matrix).to(DEVICE), found, expected.experts - 1)
    for tensor, right in zip(tensors, (expected.codes, expected.scales, expected.supers), strict=False):
        some = tensor.cpu().view(torch.uint8)
        assert torch.equal(some[:-1], right.view(torch.uint8)[:-1])
        assert (some[-1:] == 0xAB).all()


def test_wrong_sizes_are_refused() -> None:
    planes = empty_planes(Q4_K, (2, 32, 256), "cpu")
    with pytest.raises(ValueError, match="bytes of panels"):
        panels_to_planes(torch.zeros(1000, dtype=torch.uint8), planes)
    with pytest.raises(ValueError, match="multiple of a panel"):
        panels_to_planes(torch.zeros(10, dtype=torch.uint8), empty_planes(Q4_K, (2, 40, 256), "cpu"))


@pytest.mark.parametrize("rounds", [1, 2])
def test_matrices_wherever_they_lie(rounds: int) -> None:
    """The last of a stack's experts and the first, into the places of two others in another stack. With two
    rounds one program converts both."""
    for kind in (Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.TQ1_0):
        shape = (3, 32, 256)
        w = random_weights(kind, *shape)
        stream = CpuStream(1)
        matrix = w.pack(stream)
        panels = bytes_of(matrix).clone().to(DEVICE)
        expected = repack(torch.from_numpy(np.ascontiguousarray(w.rows)), QUANT_TYPES[kind], shape)
        found = empty_planes(QUANT_TYPES[kind], (4, 32, 256), DEVICE)
        targets = own_tensors(found)
        for tensor in targets:
            tensor.view(torch.uint8).fill_(0xAB)
        moves = [(2, 1), (0, 3)]
        addresses = torch.tensor(
            [
                [
                    panels.data_ptr() + source * (len(panels) // 3),
                    *(t.data_ptr() + slot * (t.nbytes // 4) if t.numel() else 0 for t in targets),
                    *[0] * (3 - len(targets)),
                ]
                for source, slot in moves
            ]
        )
        table = torch.zeros(2, rounds, 4, dtype=torch.int64)
        table[:, 0] = addresses
        unpack_scattered(table.view(-1, 4).to(DEVICE), QUANT_TYPES[kind], 32, 256, rounds)
        for source, slot in moves:
            assert torch.equal(dequantize(found, slot).cpu(), dequantize(expected, source))
        for tensor in targets:
            for slot in (0, 2):
                assert not tensor.numel() or (tensor[slot].view(torch.uint8) == 0xAB).all()
