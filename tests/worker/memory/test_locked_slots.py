"""RAM slots of experts on disk are locked as far as limits allow, and a worker starts either way."""

from __future__ import annotations

import gc
import logging
import resource

import pytest

from moeserve.kernels.cpu_stream import Matrix
from moeserve.processes.limits import lockable_bytes
from moeserve.worker.loading import locked_slots
from moeserve.worker.loading.locked_slots import LEAST_FREE_BYTES, lock_slots
from tests.kernels.operations import stream_of
from tests.support.faults.locked_memory_limit import locked_bytes, locked_memory_limit

COUNT = 3
Q8_0 = 8


@pytest.fixture
def slots() -> list[Matrix]:
    gc.collect()  # what other tests have locked
    stream = stream_of("", 1)
    return [stream.slots(Q8_0, (4, 64, 64)) for _ in range(COUNT)]


def pages_of(matrices: list[Matrix]) -> int:
    page = resource.getpagesize()
    return sum(-(-matrix.bytes // page) * page for matrix in matrices)


def test_slots_are_locked(slots: list[Matrix], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = locked_bytes()
    with locked_memory_limit(before + pages_of(slots)):
        assert lock_slots(slots)
    assert locked_bytes() == before + pages_of(slots)
    assert "RAM slots of experts are locked" in caplog.text


def test_a_limit_that_is_too_low_locks_nothing(slots: list[Matrix], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = locked_bytes()
    limit = before + pages_of(slots[:2])
    with locked_memory_limit(limit):
        assert not lock_slots(slots)
    assert locked_bytes() == before
    assert "are not locked" in caplog.text
    assert f"ulimit -l allows {limit / (1 << 20):g} MiB; raise it" in caplog.text
    assert "mlock2" not in caplog.text


@pytest.mark.parametrize(("swap", "level"), [(0, "INFO"), (1 << 30, "WARNING")])
def test_only_swap_makes_it_a_warning(
    slots: list[Matrix],
    swap: int,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(locked_slots, "swap_bytes", lambda: swap)
    with locked_memory_limit(0):
        assert not lock_slots(slots)
    (record,) = caplog.records
    assert record.levelname == level
    assert ("may be moved to swap" in caplog.text) == bool(swap)


def test_memory_that_the_rest_needs_is_not_locked(
    slots: list[Matrix], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(locked_slots, "available_bytes", lambda: LEAST_FREE_BYTES - 1)
    before = locked_bytes()
    with locked_memory_limit(before + pages_of(slots)):
        assert not lock_slots(slots)
    assert locked_bytes() == before
    assert "only 0.25 GiB of memory are free beside them; lower --expert-ram" in caplog.text


def test_the_limit_of_this_process() -> None:
    with locked_memory_limit(4096):
        assert lockable_bytes() == 4096
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        assert lockable_bytes() is None
