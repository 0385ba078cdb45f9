"""CUDA graphs: a step's launches captured once and started with one call, where they would cost more than they take.

A graph holds addresses, so what it reads and writes must stay where it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launches = Callable[[], None]


class CudaGraphs:
    """Captures launches on one device; the graphs share their memory, as they run one after another. Under Triton's
    interpreter (in tests) there are no graphs, and launches stay as they are."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_gpu else None

    def capture(self, launches: Launches, before: Launches) -> Launches:
        """Runs `before` and `launches` once, which compiles their kernels, and returns the replay of the launches on
        the current stream. `before` is what the host does for each run: it is not captured."""
        if not self._is_gpu:
            return launches
        before()
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Captures this thread alone: NCCL has one that asks for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launches()
        return graph.replay
