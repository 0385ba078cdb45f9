"""Measures the bandwidth of GPU memory."""

from __future__ import annotations

import torch

COPIED = 1 << 30  # bytes
REPEATS = 4


def read_by_copying(device: torch.device) -> tuple[float, int]:
    """Returns seconds and bytes of the fastest of several copies within GPU memory; each byte counts as read and
    written."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds), 2 * COPIED
