"""The sum over GPUs within the norm behind it: two processes that share memory, as GPUs do."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.collectives.sum_norm_op import ROW_TYPE, MessageSize, SumNorm
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.routing.op import norm_router

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter; tests/gpu has several GPUs")
RANKS, COLS, EXPERTS, EPS = 2, 96, 5, 1e-6
ROWS = 70  # of the largest message, which goes as rows
# Calls one after another: rows of the message, and how many of them exist. Few rows go as words.
CALLS = [(3, 2), (ROWS, 67), (3, 3), (ROWS, ROWS), (64, 3)]
ROUTED = [(2, 2), (1, 1), (4, 3), (2, 1), (2, 2)]


def size() -> MessageSize:
    return MessageSize(RANKS, ROWS, COLS, EXPERTS)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def own(rank: int, call: int, rows: int) -> torch.Tensor:
    partial = numbers(100 * rank + call, rows, 1, COLS)
    return partial if rows <= 64 else partial.to(ROW_TYPE)


def run_norms(rank: int, regions: torch.Tensor, found: torch.Tensor) -> None:
    """found: float32 [ranks, calls, x and exact and y, ROWS, COLS]."""
    sums = SumNorm(rank, size(), regions[rank], [region.data_ptr() for region in regions])
    for call, (rows, count) in enumerate(CALLS):
        x, exact, y = (found[rank, call, at, :rows] for at in range(3))
        x.copy_(numbers(1000 + call, rows, COLS))
        attended = numbers(2000 + call, rows, COLS) if call % 2 else None
        codes = GpuActivations(y, torch.zeros(rows, COLS, dtype=torch.int8), torch.zeros(rows, COLS // 32))
        partial = own(rank, call, rows)
        assert sums.fits(partial)
        sums.add_norm(partial, x, counter(count), numbers(1, COLS), EPS, codes, exact, attended=attended)


def run_routers(rank: int, regions: torch.Tensor, found: torch.Tensor) -> None:
    """found: float32 [ranks, calls, total and y and logits, 4, COLS]."""
    sums = SumNorm(rank, size(), regions[rank], [region.data_ptr() for region in regions])
    router, bias = numbers(2, EXPERTS, COLS), numbers(3, EXPERTS)
    for call, (rows, count) in enumerate(ROUTED):
        x, y, logits = numbers(1000 + call, rows, COLS), torch.zeros(rows, COLS), torch.zeros(rows, EXPERTS)
        sums.norm_router(
            own(rank, call, rows), x, counter(count), numbers(1, COLS), EPS, router, GpuActivations(y, None, None),
            logits, bias=bias,
        )  # fmt: skip
        found[rank, call, 0, :rows] = sums.total(rows)
        found[rank, call, 1, :rows] = y
        found[rank, call, 2, :rows, :EXPERTS] = logits


def on_two_ranks(run: object, *shape: int) -> torch.Tensor:
    regions = torch.zeros(RANKS, size().region_bytes, dtype=torch.uint8).share_memory_()
    found = torch.zeros(RANKS, *shape).share_memory_()
    assert callable(run)
    other = multiprocessing.get_context("fork").Process(target=run, args=(1, regions, found), daemon=True)
    other.start()
    run(0, regions, found)
    other.join(60)
    assert other.exitcode == 0
    assert torch.equal(found[0], found[1])  # to the bit
    return found[0]


def test_both_get_the_norm_of_the_sum() -> None:
    found = on_two_ranks(run_norms, len(CALLS), 3, ROWS, COLS)
    for call, (rows, count) in enumerate(CALLS):
        before, partials = (
            numbers(1000 + call, rows, COLS),
            [own(r, call, rows)[:, 0].float() for r in range(RANKS)],
        )
        x = before + partials[0] + partials[1]
        if call % 2:
            x += numbers(2000 + call, rows, COLS)
        expected = norm(x, numbers(1, COLS), EPS).float()
        torch.testing.assert_close(found[call, 0, :count], x[:count], atol=1e-6, rtol=1e-6)
        assert torch.equal(found[call, 0, count:rows], before[count:])
        for at in (1, 2):
            torch.testing.assert_close(found[call, at, :count], expected[:count], atol=1e-5, rtol=1e-5)
            assert not found[call, at, count:].any()


def test_codes_are_those_of_the_norm_on_one_gpu() -> None:
    """With partial sums that add up to what one GPU has."""
    x, weight, partial = numbers(5, 3, COLS), numbers(1, COLS), numbers(6, 3, 1, COLS)

    def run(rank: int, regions: torch.Tensor, found: torch.Tensor) -> None:
        sums = SumNorm(rank, size(), regions[rank], [region.data_ptr() for region in regions])
        y = GpuActivations(None, torch.zeros(3, COLS, dtype=torch.int8), torch.zeros(3, COLS // 32))
        sums.add_norm(partial / 2, x.clone(), counter(3), weight, EPS, y)
        assert y.codes is not None
        found[rank].copy_(y.codes.float())

    found = on_two_ranks(run, 3, COLS)
    codes, scales = torch.zeros(3, COLS, dtype=torch.int8), torch.zeros(3, COLS // 32)
    add_norm(x.clone(), partial, None, None, None, None, counter(3), weight, EPS, None, codes, scales)
    assert torch.equal(found, codes.float())
    assert codes.any()


def test_both_get_the_routers_logits_of_the_sum() -> None:
    found = on_two_ranks(run_routers, len(ROUTED), 3, 4, COLS)
    for call, (rows, count) in enumerate(ROUTED):
        x, total = numbers(1000 + call, rows, COLS), sum(own(r, call, rows) for r in range(RANKS))
        assert isinstance(total, torch.Tensor)
        y, logits = torch.zeros(rows, COLS), torch.zeros(rows, EXPERTS)
        norm_router(
            x, total[:, 0], counter(count), numbers(1, COLS), EPS, numbers(2, EXPERTS, COLS), y, None, None, logits,
            bias=numbers(3, EXPERTS),
        )  # fmt: skip
        # A call's total lies where that of an earlier one of as many rows did.
        torch.testing.assert_close(found[call, 0, :count], total[:count, 0])
        torch.testing.assert_close(found[call, 1, :count], y[:count])
        torch.testing.assert_close(found[call, 2, :count, :EXPERTS], logits[:count])
        assert logits[:count].any()


def test_a_trial_ends_although_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.kernels.collectives.sum_norm_op.TRIAL_POLLS", 3)
    regions = torch.zeros(RANKS, size().region_bytes, dtype=torch.uint8)
    sums = SumNorm(0, size(), regions[0], [region.data_ptr() for region in regions])
    sums.trial(True)
    for rows in (3, ROWS):
        x, y = torch.zeros(rows, COLS), torch.zeros(rows, COLS)
        partial = own(0, 0, rows)
        sums.add_norm(partial, x, counter(rows), numbers(1, COLS), EPS, GpuActivations(y, None, None))
        assert torch.equal(x, partial[:, 0].float())  # with nothing of the other's
    logits = torch.zeros(2, EXPERTS)
    normed = GpuActivations(torch.zeros(2, COLS), None, None)
    sums.norm_router(
        own(0, 0, 2),
        torch.zeros(2, COLS),
        counter(2),
        numbers(1, COLS),
        EPS,
        numbers(2, EXPERTS, COLS),
        normed,
        logits,
    )
    assert torch.equal(sums.total(2), own(0, 0, 2)[:, 0])
