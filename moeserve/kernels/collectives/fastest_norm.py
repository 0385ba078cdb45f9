"""Chooses by measurement, per size, where the all-reduce fused with the following norm is faster than the fastest
separate one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.collectives.all_reduce import AllReduce
from moeserve.kernels.collectives.fastest import seconds_of
from moeserve.kernels.collectives.sum_norm_op import ROUTER_ROWS, ROW_TYPE, WORD_ROWS, SumNorm
from moeserve.kernels.norm.op import add_norm

EPS = 1e-6
# Fewest rows whose sum is fused with the norm. With fewer, the fused kernel is faster by itself but not within a step,
# where other kernels start while a sum waits: one stream took 2 to 4% longer (docs/results/several-gpus.md).
LEAST_ROWS = 8

log = logging.getLogger(__name__)


def choose_norms(
    within_norm: SumNorm,
    all_reduce: AllReduce,
    rows: Sequence[int],
    hidden: int,
    experts: int,
    device: torch.device,
    agree: Callable[[float], float],
    measure: Callable[[Callable[[], None]], float] = seconds_of,
) -> None:
    """Makes `within_norm` accept messages of each number of rows in `rows` (LEAST_ROWS or more) for which it is correct
    and faster. agree: returns the smallest value of all ranks on all of them. measure: returns the seconds of a
    call."""
    for n in rows:
        own = _numbers(n, hidden, device).to(torch.float32 if n <= WORD_ROWS else ROW_TYPE)
        if n < LEAST_ROWS or not within_norm.fits(own):
            continue
        if agree(float(_is_right(within_norm, all_reduce, own, experts))) < 1.0:
            log.warning("the kernel that sums and norms is wrong for %d rows; two kernels are used", n)
            continue
        if _is_faster(within_norm, all_reduce, own, agree, measure):
            within_norm.choose(own)


def _is_faster(
    within_norm: SumNorm,
    all_reduce: AllReduce,
    own: Tensor,
    agree: Callable[[float], float],
    measure: Callable[[Callable[[], None]], float],
) -> bool:
    x, count, weight = _stream(own)
    y = GpuActivations(torch.empty_like(own[:, 0]), None, None)

    def apart() -> None:
        all_reduce(own)
        add_norm(x, own, None, None, None, None, count, weight, EPS, y.x, None, None)

    def within() -> None:
        within_norm.add_norm(own, x, count, weight, EPS, y)

    seconds = [agree(measure(way)) for way in (apart, within)]
    log.info(
        "a sum of %d rows and its norm: %.1f us as two kernels, %.1f us as one",
        len(own),
        *(s * 1e6 for s in seconds),
    )
    return seconds[1] < seconds[0]


def _is_right(within_norm: SumNorm, all_reduce: AllReduce, own: Tensor, experts: int) -> bool:
    expected = own.clone()
    all_reduce(expected)
    x, count, weight = _stream(own)
    y = GpuActivations(torch.empty_like(x), None, None)
    within_norm.trial(True)
    within_norm.add_norm(own, x, count, weight, EPS, y)
    found = [x]
    if experts and len(own) in ROUTER_ROWS:
        router, logits = (
            torch.zeros(experts, x.shape[1], device=x.device),
            torch.empty(len(own), experts, device=x.device),
        )
        within_norm.norm_router(own, torch.zeros_like(x), count, weight, EPS, router, y, logits)
        found.append(within_norm.total(len(own)))
    within_norm.trial(False)
    return all(torch.equal(each, expected[:, 0].float()) for each in found)


def _stream(own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a residual stream of zeros, its number of rows, and a norm's weight."""
    n, _, hidden = own.shape
    count = torch.tensor([n], dtype=torch.int32, device=own.device)
    return torch.zeros(n, hidden, device=own.device), count, torch.ones(hidden, device=own.device)


def _numbers(rows: int, hidden: int, device: torch.device) -> Tensor:
    """Returns numbers [rows, 1, hidden] whose sums are exact in every dtype."""
    return (torch.arange(rows * hidden, device=device) % 31).view(rows, 1, hidden)
