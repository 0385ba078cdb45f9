"""Measures a GPU's speed with torch, in a moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from moeserve.cli.plan.rates import GpuRates

REPEATS = 10


def measure_gpu(device: torch.device, nbytes: int = 256 << 20, side: int = 8192) -> GpuRates:
    """Returns three measured rates, in bytes and in operations per second: copies of `nbytes` within the GPU's memory
    (more than its cache), copies of as much from pinned RAM, and a product of two random bfloat16 matrices [side,
    side]. With zeros the product would be a tenth faster."""
    here = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    in_ram = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(a)
    return GpuRates(
        read=2 * nbytes / _seconds(device, lambda: there.copy_(here)),  # bytes read and written
        ops=2 * side**3 / _seconds(device, lambda: torch.mm(a, a, out=product)),
        pcie=nbytes / _seconds(device, lambda: there.copy_(in_ram, non_blocking=True)),
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the median time of some calls, after one warm-up call."""
    times: list[float] = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
