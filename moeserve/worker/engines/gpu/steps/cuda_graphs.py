"""CUDA graphs: the launches of a step captured once and replayed by one call, where launching one by one is too
slow.

A graph contains addresses, so the buffers that it uses must not move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

Launches = Callable[[], None]
REPLAYS: Final = 8  # that are timed


class CudaGraphs:
    """Captures graphs on one device; they share memory, as they run one after another. Under Triton's interpreter
    (in tests) nothing is captured and launches run as they are."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_gpu else None

    def capture(self, launches: Launches, before: Launches) -> Launches:
        """Runs `before` and `launches` once, which compiles their kernels, then captures `launches`. Returns a
        function that replays them on the current stream. `before` is the host's preparation of each run and is not
        captured."""
        if not self._is_gpu:
            return launches
        before()
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Capture this thread only: a thread of NCCL creates events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launches()
        return graph.replay


def replay_ms(replay: Launches, replays: int = REPLAYS) -> float:
    """Returns the GPU's milliseconds of one of several replays that are launched one after another."""
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / replays
