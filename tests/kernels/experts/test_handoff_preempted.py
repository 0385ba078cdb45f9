"""A hand-off whose threads lose their cores: the GPU gets its answers all the same, and they have the same bits."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kernels.experts.handoff_world import (  # isort: skip  (first: it sets up the interpreter)
    EXPERTS,
    FF,
    HERE,
    HIDDEN,
    MAX_TOKENS,
    TOP_K,
    HandGpu,
    Layer,
    alone,
    local_routes,
)
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff
from moeserve.kernels.stream_operands import ThreadPlacement
from tests.kernels.weights import activations, random_weights
from tests.support.servers.waiting import within

LAYERS = 4


def few_experts(stream: CpuStream, seed: int) -> Layer:
    """Two: what a late thread finds of another layer would be beyond them."""
    shapes = ((FF, HIDDEN), (FF, HIDDEN), (HIDDEN, FF))
    gate, up, down = (random_weights(Type.Q8_0, 2, *shape, seed=seed + i) for i, shape in enumerate(shapes))
    local = torch.full((EXPERTS,), -1, dtype=torch.int32)
    local[HERE[:2]] = torch.arange(2, dtype=torch.int32)
    return Layer(CpuExperts(*(w.pack(stream) for w in (gate, up, down)), local), (gate, up, down))


class World:
    """Steps of random sizes, by hand."""

    def __init__(self, stream: CpuStream) -> None:
        self.stream, self.alone = stream, CpuStream(1, stream.isa)
        make = (Layer.random, few_experts)
        self.layers = [make[i % 2](stream, seed=10 * i) for i in range(LAYERS)]
        self._same = [make[i % 2](self.alone, seed=10 * i) for i in range(LAYERS)]
        experts = [layer.experts for layer in self.layers]
        self.handoff = ExpertHandoff(stream, experts, MAX_TOKENS, HIDDEN, TOP_K, "cpu", timeout_s=120.0)
        self.gpu, self.step = HandGpu(self.handoff), 0

    def run(self, *, most_experts: int = len(HERE)) -> None:
        """One step, which has been begun."""
        self.step += 1
        for i, same in enumerate(self._same):
            seed = self.step * LAYERS + i
            n = 1 + seed * 5 % MAX_TOKENS
            x, (ids, weights) = activations("gaussian", n, HIDDEN, seed=seed), local_routes(n, seed)
            ids[ids >= min(most_experts, same.experts.gate.experts)] = -1
            if seed % 3 == 0:
                ids[:] = -1  # nothing for the CPU
            self.gpu.publish(i, self.step, x, ids, weights)
            if (ids >= 0).any():
                self.gpu.wait(i)
                expected = alone(self.alone, same, x, ids, weights)
                assert torch.equal(self.gpu.result(i, n), expected), (self.step, i)


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [((0, 0), 50), pytest.param((0,) * 7, 100, marks=pytest.mark.slow), ((0, 0, 1, 1), 50)],
    ids=["two", "seven", "two nodes"],
)
def test_threads_that_share_one_cpu(nodes: tuple[int, ...], rounds: int) -> None:
    cpu = min(os.sched_getaffinity(0))
    world = World(CpuStream([ThreadPlacement(node, (cpu,)) for node in nodes]))
    for _ in range(rounds):
        world.handoff.begin()
        world.handoff.begin()  # one ahead
        world.run()
        world.run()
    world.stream.wait()
    world.handoff.check()
    world.handoff.close()


def is_paused(thread: int) -> bool:
    """Whether a thread of this process is in pause(2), of x86-64."""
    return Path(f"/proc/self/task/{thread}/syscall").read_text().startswith("34 ")


def has_pending(thread: int) -> bool:
    """Whether a signal waits for the thread: it would end the process once the handlers are the usual ones."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("SigPnd:")[2].split()[0], 16) != 0


@contextmanager
def stopped(threads: list[int]) -> Iterator[None]:
    """Within, these threads of the process stand still, wherever they were."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handlers = {signal.SIGUSR1: libc.pause, signal.SIGUSR2: libc.getpid}
    before = {number: libc.signal(number, ctypes.cast(f, ctypes.c_void_p)) for number, f in handlers.items()}

    def send(number: int) -> None:
        for thread in threads:
            assert libc.tgkill(os.getpid(), thread, number) == 0

    send(signal.SIGUSR1)
    assert within(30, lambda: all(map(is_paused, threads)))
    try:
        yield
    finally:
        send(signal.SIGUSR2)
        assert within(30, lambda: not any(is_paused(thread) or has_pending(thread) for thread in threads))
        for number, handler in before.items():
            libc.signal(number, handler)


@pytest.mark.parametrize("when", ["before the step", "while they look for a request"])
@pytest.mark.parametrize("running", [0, 1, 2])
def test_no_step_waits_for_threads_that_stand_still(when: str, running: int) -> None:
    """All but one, the first among them or not: that one does the work of all, and the others leave it out later."""
    before = set(os.listdir("/proc/self/task"))
    stream = CpuStream(3)
    threads = sorted(int(name) for name in set(os.listdir("/proc/self/task")) - before)
    world = World(stream)
    assert len(threads) == 3
    others = [thread for i, thread in enumerate(threads) if i != running]
    for _ in range(2):
        if when == "before the step":
            stream.wait()
            with stopped(others):
                world.handoff.begin()
                world.run()
        else:
            world.handoff.begin()
            time.sleep(0.01)
            with stopped(others):
                world.run()
                world.handoff.begin()
                world.run()
        world.handoff.begin()
        world.run()
    stream.wait()
    world.handoff.check()
    world.handoff.close()
