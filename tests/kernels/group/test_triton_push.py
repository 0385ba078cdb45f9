"""The sum of small messages through inboxes in one another's memory: two processes that share some, as GPUs do."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.collectives.push import BLOCK, MAX_NUMBERS, PushSum

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda", reason="of the interpreter; on GPUs it is tried at each start"
)
SIZES = (BLOCK + 3, 5, BLOCK + 3)  # of one call after another


def numbers(rank: int, call: int) -> torch.Tensor:
    return torch.randn(SIZES[call], generator=torch.Generator().manual_seed(10 * rank + call))


def run(rank: int, inboxes: torch.Tensor, sums: torch.Tensor) -> None:
    add = PushSum(rank, inboxes[rank], [inbox.data_ptr() for inbox in inboxes])
    for call in range(len(SIZES)):
        x = numbers(rank, call)
        add(x)
        sums[rank, call, : len(x)] = x


def test_both_get_the_sum_of_each_call() -> None:
    inboxes = torch.zeros(2, 2, 2, MAX_NUMBERS, dtype=torch.int64).share_memory_()
    sums = torch.zeros(2, len(SIZES), max(SIZES)).share_memory_()
    other = multiprocessing.get_context("fork").Process(target=run, args=(1, inboxes, sums), daemon=True)
    other.start()
    run(0, inboxes, sums)
    other.join(60)
    assert other.exitcode == 0
    for call, size in enumerate(SIZES):
        expected = numbers(0, call) + numbers(1, call)
        assert torch.equal(sums[0, call, :size], expected)
        assert torch.equal(sums[1, call, :size], expected)
        assert not sums[:, call, size:].any()


def test_a_trial_ends_although_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.kernels.collectives.push.TRIAL_POLLS", 3)
    inboxes = torch.zeros(2, 2, 2, MAX_NUMBERS, dtype=torch.int64)
    x = numbers(0, 1)
    PushSum(0, inboxes[0], [inbox.data_ptr() for inbox in inboxes]).try_once(x)
    assert torch.equal(x, numbers(0, 1))  # with nothing of the other's
