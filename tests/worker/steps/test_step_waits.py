"""A step on the CPU queues all that it computes and waits once: each further wait leaves the pool without work."""

from __future__ import annotations

import pytest

from moeserve.cli.bench.engine import EngineBench
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.conftest import TINY_MODEL
from tests.gpu.driver import small_config


def test_a_decode_step_waits_for_the_pool_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EngineBench(load_cpu_runner(small_config(TINY_MODEL), lambda *_: None), 64)
    bench.prefill(1, 8)
    queued: list[int] = []  # operations that each wait waits for
    wait = CpuStream.wait

    def counted(stream: CpuStream) -> None:
        queued.append(len(stream._held))
        wait(stream)

    monkeypatch.setattr(CpuStream, "wait", counted)
    bench.decode(1, 8, 3)
    assert sum(count > 0 for count in queued) == 3
