"""Where weights lie (packed, in the mapped file, on several NUMA nodes) does not change a bit of any result."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.stream_operands import ThreadPlacement
from tests.kernels.experts.expert_layer import HIDDEN, Layer, routing
from tests.kernels.operations import COSTLY_ISAS, ISAS, head, load, run_experts, run_linear, stream_of
from tests.kernels.weights import TYPES, Weights, activations, random_weights

each_isa = pytest.mark.parametrize("isa", ISAS)
each_vector_isa = pytest.mark.parametrize("isa", COSTLY_ISAS)
each_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
ROWS = [1, 31, 32, 33, 100]

# Logical nodes, which need no such machine: threads divided evenly, unevenly, and more nodes than panels.
NODES = {
    "two": [ThreadPlacement(0), ThreadPlacement(1)],
    "two of three threads": [ThreadPlacement(0), ThreadPlacement(0), ThreadPlacement(1)],
    "five": [ThreadPlacement(node) for node in range(5)],
}


@each_vector_isa
@each_type
def test_in_place(kind: Type, isa: str) -> None:
    stream, x = stream_of(isa), load(activations("gaussian", 65, 768))
    for rows in ROWS:
        weights = random_weights(kind, rows, 768)
        view = weights.view(stream)
        assert (view.rows, view.cols, view.bytes) == (rows, 768, weights.rows.nbytes)
        matrix = weights.pack(stream)
        for n in (1, 4, 9, 65):
            (packed,) = run_linear(stream, head(x, n), [matrix])
            assert torch.equal(run_linear(stream, head(x, n), [view])[0], packed), (rows, n)


@lru_cache(maxsize=len(ISAS))
def streams_on_nodes(isa: str) -> list[CpuStream]:
    return [CpuStream(places, isa) for places in NODES.values()]


@each_isa
@each_type
def test_memory_nodes(kind: Type, isa: str) -> None:
    x = load(activations("gaussian", 9, 256))
    streams = streams_on_nodes(isa)
    for rows in ROWS:
        weights = random_weights(kind, rows, 256)
        (expected,) = run_linear(stream_of(isa), x, [weights.pack(stream_of(isa))])
        for stream in streams:
            for matrix in (weights.pack(stream), weights.view(stream)):
                assert torch.equal(run_linear(stream, x, [matrix])[0], expected), (rows, stream.nodes)


@each_isa
@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.BF16, Type.Q8_0, Type.F16)])
def test_experts(kinds: tuple[Type, Type, Type], isa: str) -> None:
    """Each expert's panels are divided among the nodes; [E, out, in] holds in place, too."""
    layer, y, routes = Layer.random(*kinds), load(activations("gaussian", 70, HIDDEN)), routing(70)

    def run(stream: CpuStream, *, in_place: bool) -> torch.Tensor:
        def place(w: Weights) -> Matrix:
            return w.view(stream) if in_place else w.pack(stream)

        return run_experts(stream, y, (place(layer.gate), place(layer.up), place(layer.down)), *routes)

    expected = run(stream_of(isa), in_place=False)
    assert torch.equal(run(stream_of(isa), in_place=True), expected)
    for stream, places in zip(streams_on_nodes(isa), NODES.values(), strict=True):
        assert stream.nodes == 1 + places[-1].node
        assert torch.equal(run(stream, in_place=False), expected)
        assert torch.equal(run(stream, in_place=True), expected)


def at_the_end_of_memory(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy whose last byte is the last that may be read: the page after it is closed."""
    page = mmap.PAGESIZE
    size = -(-rows.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), page, 0) == 0
    copy: npt.NDArray[np.uint8] = np.ndarray(rows.shape, np.uint8, memory, size - rows.nbytes)
    copy[...] = rows
    return copy


@each_isa
@each_type
def test_nothing_is_read_past_the_end_of_the_file(kind: Type, isa: str) -> None:
    """A tensor may end with the file and the file with a page: one byte more would end the process."""
    stream = stream_of(isa)
    for rows, cols in ((1, 256), (33, 256), (48, 512)):
        weights = random_weights(kind, rows, cols)
        last = Weights(kind, at_the_end_of_memory(weights.rows), cols)
        x = load(activations("gaussian", 5, cols))
        (expected,) = run_linear(stream, x, [weights.pack(stream)])
        for matrix in (stream.pack(last.rows, int(kind), last.shape), last.view(stream)):
            assert torch.equal(run_linear(stream, x, [matrix])[0], expected)
