"""The thread pool as a stream: order, any number of threads, more queued than fits, and no CPU used when idle."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import threading
import time

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, Matrix
from tests.kernels.operations import ISAS, load, run_linear, stream_of
from tests.kernels.weights import activations, random_weights
from tests.support.servers.idle import comes_to_rest
from tests.support.servers.waiting import within

BEST = ISAS[-1]


class Adder:
    """out += x W^T, again and again: the number of times it ran can be read from the result, exactly."""

    def __init__(self, stream: CpuStream) -> None:
        self.x = load(torch.ones(1, 32))
        self.matrix = random_weights(Type.F32, 64, 32).pack(stream)
        self.group = LinearGroup([self.matrix])
        self.out = torch.zeros(1, 64)
        self.once = run_linear(stream, self.x, [self.matrix])[0]
        self.stream = stream

    def queue(self, times: int) -> None:
        for _ in range(times):
            self.stream.linear(self.x, 1, self.group, [self.out], add=True)

    def expected(self, times: int) -> torch.Tensor:
        total = torch.zeros(1, 64)
        for _ in range(times):
            total += self.once
        return total


def slow_operation(stream: CpuStream) -> tuple[Matrix, LinearGroup]:
    matrix = random_weights(Type.F32, 2048, 1024).pack(stream)
    return matrix, LinearGroup([matrix])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thousands_of_operations_queue_and_run_in_order(threads: int) -> None:
    """Behind a slow one, so that the ring of 1024 is full for a while; each runs exactly once."""
    stream = stream_of(BEST, threads)
    adder = Adder(stream)
    x, out = load(activations("gaussian", 64, 1024)), torch.empty(64, 2048)
    matrix, group = slow_operation(stream)
    stream.wait()
    stream.linear(x, 64, group, [out])
    adder.queue(4000)
    stream.wait()
    assert torch.equal(adder.out, adder.expected(4000))
    assert torch.equal(out, run_linear(stream, x, [matrix])[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_who_waits_fetches_what_the_next_operation_reads(threads: int) -> None:
    """A norm of one row leaves nothing to do for the second thread; a lone thread never waits for others."""
    stream = stream_of(BEST, threads)
    matrix = random_weights(Type.F32, 2048, 1024).pack(stream)
    group, y = LinearGroup([matrix]), load(torch.ones(1, 1024))
    x, out, ones = torch.ones(1, 1024), torch.empty(1, 2048), torch.ones(1024)
    before = stream.fetched_ahead

    def has_fetched() -> bool:
        for _ in range(200):
            stream.norm(x, ones, 1e-6, 1, y)
            stream.linear(y, 1, group, [out])
        stream.wait()
        return stream.fetched_ahead > before

    assert within(30, has_fetched) if threads > 1 else not has_fetched()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sleeping_threads_wake_for_each_operation(threads: int) -> None:
    """Pauses longer than the spinning, and the handshake of a wait after every single operation."""
    adder = Adder(stream_of(BEST, threads))
    for i in range(600):
        adder.queue(1)
        adder.stream.wait()
        if i % 20 == 0:
            time.sleep(0.001)
    assert torch.equal(adder.out, adder.expected(600))


def test_wait_with_nothing_queued_returns() -> None:
    stream = CpuStream(3, BEST)
    stream.wait()
    stream.wait()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64")
def test_threads_ask_for_short_slices() -> None:
    """0.1 ms, from Linux 6.12 on."""
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 12):
        pytest.skip("an older kernel")
    before = set(os.listdir("/proc/self/task"))
    stream = CpuStream(2, BEST)
    run_linear(stream, load(torch.ones(1, 32)), [random_weights(Type.F32, 64, 32).pack(stream)])
    threads = set(os.listdir("/proc/self/task")) - before
    assert len(threads) == 2
    libc, attributes = ctypes.CDLL(None), (ctypes.c_uint64 * 6)()
    for thread in threads:
        assert libc.syscall(315, int(thread), attributes, ctypes.sizeof(attributes), 0) == 0  # sched_getattr
        assert attributes[3] == 100_000


def test_an_idle_pool_uses_no_cpu() -> None:
    adder = Adder(CpuStream(4, BEST))
    adder.queue(10)
    adder.stream.wait()
    assert comes_to_rest(time.process_time, 0.003, 0.3)  # 1% of one core


def test_waiting_leaves_python_free() -> None:
    """wait() gives up the GIL: the worker's other threads go on."""
    stream = stream_of(BEST)
    x, out = load(activations("gaussian", 64, 1024)), torch.empty(64, 2048)
    _, group = slow_operation(stream)
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    most = 0
    for _ in range(100):  # on a busy machine the other thread may have had no core
        for _ in range(50):
            stream.linear(x, 64, group, [out])
        before = ticks
        stream.wait()
        most = max(most, ticks - before)
        if most > 5:
            break
    stop.set()
    thread.join()
    assert most > 5


def test_a_pool_that_is_dropped_finishes_first_and_ends_its_threads() -> None:
    before = threads_of_this_process()
    adder = Adder(CpuStream(4, BEST))
    own = threads_of_this_process() - before
    assert len(own) == 4
    adder.queue(500)
    del adder.stream  # the operations hold addresses only: adder keeps what they use
    assert torch.equal(adder.out, adder.expected(500))
    deadline = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
    while own & threads_of_this_process() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not own & threads_of_this_process()


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no 'avx1024' kernels"):
        CpuStream(1, "avx1024")
