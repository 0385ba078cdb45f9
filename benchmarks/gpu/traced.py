"""What a GPU does in some steps, by CUPTI."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Event(NamedTuple):
    name: str
    grid: tuple[int, ...]
    start: float  # microseconds
    end: float


def trace(steps: Sequence[Callable[[], object]]) -> list[Event]:
    """Kernels and copies of these steps, by their start."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    found = [
        Event(e["name"], tuple(e["args"].get("grid", ())), float(e["ts"]), float(e["ts"] + e["dur"]))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda event: event.start)
