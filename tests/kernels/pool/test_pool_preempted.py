"""A pool whose threads lose their core in the midst of the work: the same bits, and every unit counted once."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import AttentionPlan, CpuStream, LinearGroup
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer, RoutingWorkspace, ThreadPlacement
from tests.kernels.operations import ISAS, load
from tests.kernels.weights import activations, random_weights

HIDDEN, FF, EXPERTS, TOP_K, ROWS, LAYERS = 256, 512, 8, 2, 3, 20
HEADS, POSITIONS = Heads(8, 2, 32), (1030, 40, 7)
BEST = ISAS[-1]


class Layers:
    """x = x + W norm(x), x = x + attention(x), x = x + experts(norm(x)), again and again in one workspace: whatever is
    computed wrongly, added twice or read too late changes all that follows, the experts that are chosen too."""

    def __init__(self, stream: CpuStream) -> None:
        self._stream = stream
        self._dense = random_weights(Type.Q4_K, HIDDEN, HIDDEN, seed=1).pack(stream)
        self._router = random_weights(Type.F32, EXPERTS, HIDDEN, seed=2).pack(stream)
        self._gate = random_weights(Type.Q4_K, EXPERTS, FF, HIDDEN, seed=3).pack(stream)
        self._up = random_weights(Type.Q4_K, EXPERTS, FF, HIDDEN, seed=4).pack(stream)
        self._down = random_weights(Type.Q6_K, EXPERTS, HIDDEN, FF, seed=5).pack(stream)
        self._ones = torch.ones(HIDDEN)
        self._y, self._h = load(torch.zeros(ROWS, HIDDEN)), Activations(ROWS * TOP_K, FF)
        generator = torch.Generator().manual_seed(6)
        keys, values = (
            torch.randn(max(POSITIONS) + 1, HEADS.num_kv, HEADS.dim, generator=generator).half()
            for _ in range(2)
        )
        self._kv, self._plan, self._attended = (
            KvLayer(keys, values),
            AttentionPlan(),
            Activations(ROWS, HIDDEN),
        )
        self._logits, self._room = torch.zeros(ROWS, EXPERTS), RoutingWorkspace(ROWS, EXPERTS, TOP_K)
        self.counts = torch.zeros(2, EXPERTS, dtype=torch.int64)

    def run(self) -> Tensor:
        stream, x = self._stream, activations("gaussian", ROWS, HIDDEN)
        rows = np.arange(ROWS, dtype=np.int32)
        table = np.tile(np.arange(max(POSITIONS) + 1, dtype=np.int32), (ROWS, 1))
        positions = np.array(POSITIONS, np.int32)
        build_attention_plan(
            self._plan, rows, np.ones_like(rows), positions, rows, table, HEADS, stream.threads
        )
        for _ in range(LAYERS):
            stream.norm(x, self._ones, 1e-6, ROWS, self._y)
            stream.linear(self._y, ROWS, LinearGroup([self._dense]), [x], add=True)
            stream.attention(self._plan, self._y.f32, self._kv, self._attended, HEADS)
            stream.linear(self._attended, ROWS, LinearGroup([self._dense]), [x], add=True)
            stream.norm(x, self._ones, 1e-6, ROWS, self._y)
            stream.linear(self._y, ROWS, LinearGroup([self._router]), [self._logits])
            stream.route(self._logits, ROWS, self._room)
            stream.experts(
                self._gate, self._up, self._down, self._y, ROWS, self._room, self._h, self.counts, x
            )
        stream.wait()
        return x


def assert_same_bits(stream: CpuStream, seconds: float = 0.0) -> None:
    """Each of 20 runs, and of the further runs that `seconds` leaves time for, has the bits of one thread."""
    alone = Layers(CpuStream(1, BEST))
    expected = alone.run()
    layers = Layers(stream)
    end, runs = time.monotonic() + seconds, 0
    while runs < 20 or time.monotonic() < end:
        assert torch.equal(layers.run(), expected)
        runs += 1
    assert torch.equal(layers.counts, alone.counts * runs)


def on_one_cpu(*nodes: int) -> list[ThreadPlacement]:
    return [ThreadPlacement(node, (min(os.sched_getaffinity(0)),)) for node in nodes]


@pytest.mark.parametrize("nodes", [(0, 0), (0,) * 7, (0, 0, 1, 1)], ids=["two", "seven", "two nodes"])
def test_threads_that_share_one_cpu(nodes: tuple[int, ...]) -> None:
    assert_same_bits(CpuStream(on_one_cpu(*nodes), BEST))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(0,) * 7, (0, 0, 1, 1)], ids=["seven", "two nodes"])
def test_minutes_in_which_work_is_taken_over(nodes: tuple[int, ...]) -> None:
    """Hundreds of units, at least, are computed by another thread than the one that had begun them."""
    stream = CpuStream(on_one_cpu(*nodes), BEST)
    assert_same_bits(stream, 60.0)
    assert stream.recomputed > 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's scheduling classes")
def test_a_thread_that_hardly_ever_runs() -> None:
    """Beside another on its CPU it gets 1 part in 300 of the time: it stops wherever it stands."""
    before = set(os.listdir("/proc/self/task"))
    stream = CpuStream(on_one_cpu(0, 0, 0), BEST)
    own = sorted(set(os.listdir("/proc/self/task")) - before)
    os.sched_setscheduler(int(own[0]), os.SCHED_IDLE, os.sched_param(0))
    assert_same_bits(stream, 60.0)
    assert stream.recomputed > 0
