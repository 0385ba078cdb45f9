"""What the pool's threads do phase by phase, by the times that they keep: small operations are done in passing, a
router's few panels are halved, and the times add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream, LinearGroup
from moeserve.kernels.phase_times import (
    PHASE_TIMES,
    operation_names,
    phase_ticks,
    phase_times,
    time_phases,
)
from moeserve.kernels.stream_operands import Activations, RoutingWorkspace
from tests.kernels.operations import ISAS, load
from tests.kernels.weights import activations, random_weights
from tests.support.measuring.phase_kinds import Kind, spent_by_kind

BEST = ISAS[-1]
HIDDEN, EXPERTS = 256, 128


class Router:
    """y = norm(x + W x), its router's choice, all queued behind an operation that takes longer than queueing."""

    def __init__(self, threads: int) -> None:
        self.stream = CpuStream(threads, BEST)
        self._slow = LinearGroup([random_weights(Type.F32, 2048, 1024).pack(self.stream)])
        self._slow_x, self._slow_out = load(activations("gaussian", 64, 1024)), torch.empty(64, 2048)
        self._dense = LinearGroup([random_weights(Type.Q4_K, HIDDEN, HIDDEN, seed=1).pack(self.stream)])
        self._router = LinearGroup([random_weights(Type.F32, EXPERTS, HIDDEN, seed=2).pack(self.stream)])
        self.queued = 0  # ticks, when the last run's operations had been queued
        self._x, self._ones = load(activations("gaussian", 1, HIDDEN)), torch.ones(HIDDEN)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm's result and the experts chosen."""
        x, y = self._x.f32.clone(), Activations(1, HIDDEN)
        logits, chosen = torch.zeros(1, EXPERTS), RoutingWorkspace(1, EXPERTS, 8)
        stream = self.stream
        stream.linear(self._slow_x, 64, self._slow, [self._slow_out])
        stream.linear(self._x, 1, self._dense, [x], add=True)
        stream.norm(x, self._ones, 1e-6, 1, y)
        stream.linear(y, 1, self._router, [logits])
        stream.route(logits, 1, chosen)
        self.queued = phase_ticks()
        stream.wait()
        return y.f32, chosen.ids

    def phases(self) -> list[tuple[str, int, bool]]:
        """Each phase's operation, its units, whether a thread went on with what is behind it.

        A run whose first operation ended before the others were queued, because this thread had to wait for a core, is
        repeated."""
        pool = self.stream.pool
        for _ in range(50):
            time_phases(pool, 64)
            self.run()
            times = phase_times(pool)
            time_phases(pool, 0)
            # No thread had left it: one that begins it late, for want of a core, may find it done.
            if min(int(each["over"][0]) for each in times) > self.queued:
                break
        else:
            pytest.fail("the operations were never queued in time")
        all_names = operation_names(pool)
        names = [all_names[number] for number in times[0]["operation"]]
        units = sum(each["units"].astype(int) for each in times)
        ahead = np.max([each["ahead"] for each in times], axis=0)
        return [
            (name, int(number), bool(ticks > 0))
            for name, number, ticks in zip(names, units, ahead, strict=True)
        ]


def test_small_operations_are_done_in_passing() -> None:
    """The norm of a row and the choice of its experts are no phases of their own, with the bits of a lone thread."""
    router = Router(2)
    assert router.phases() == [("LinearOp", 64, False), ("LinearOp", 8, True), ("LinearOp", 4, True)]
    expected = Router(1).run()
    for _ in range(50):
        for own, other in zip(router.run(), expected, strict=True):
            assert torch.equal(own, other)


def test_few_panels_of_floats_are_halved() -> None:
    """4 panels for 5 threads."""
    router = Router(5)
    assert router.phases()[-1] == ("LinearOp", 8, True)
    assert torch.equal(router.run()[1], Router(1).run()[1])


def test_times_of_phases() -> None:
    router = Router(3)
    time_phases(router.stream.pool, 2)  # room for two of three
    router.run()
    times = phase_times(router.stream.pool)
    assert len(times) == 3
    assert all(len(each) == 2 for each in times)
    for each in times:
        assert each["phase"].tolist() == times[0]["phase"].tolist()
        assert (each["entered"] <= each["begun"]).all()
        assert (each["begun"] <= each["over"]).all()
        assert (np.diff(each["phase"]) == 1).all()
    time_phases(router.stream.pool, 0)
    router.run()
    assert [len(each) for each in phase_times(router.stream.pool)] == [0, 0, 0]


def test_where_the_time_goes() -> None:
    """Two threads, one phase behind another: the second thread comes late, and waits for the first."""
    first = np.array([(1, 0, 1, 1, 0, 10, 11, 0), (2, 1, 1, 3, 12, 40, 41, 6)], PHASE_TIMES)
    second = np.array([(1, 0, 1, 0, 0, 0, 12, 0), (2, 1, 1, 1, 21, 31, 40, 0)], PHASE_TIMES)
    found = spent_by_kind([first, second], ["NormOp", "LinearOp"])
    assert list(found) == [Kind("NormOp", 1, 1), Kind("LinearOp", 1, 4)]
    linear = found[Kind("LinearOp", 1, 4)]
    assert (linear.wall, linear.late, linear.latest) == ([29.0], [5.5], [10.0])
    assert (linear.working, linear.longest, linear.ahead, linear.idle) == ([19.0], [28.0], [6.0], [4.5])
