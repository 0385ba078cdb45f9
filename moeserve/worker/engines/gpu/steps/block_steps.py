"""What the block that drafts on a GPU computes after each step, so that it can draft: by CUDA graphs, by step size.

They are apart from the steps' graphs, because the block need not keep up with every step (`Keeping.is_on`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath
from moeserve.worker.engines.keeping import Keeping

TIMED: Final = 8  # replays that are timed


class BlockSteps:
    """Owns the graphs. Steps run one at a time."""

    def __init__(self, model: GpuDecoder, inputs: Mapping[int, StepInputs], sizes: Sequence[int]) -> None:
        """model: with a block that drafts. inputs: by step size. sizes: of steps with CUDA graphs."""
        assert model.next_token is not None
        self.keeping = Keeping()
        self._model, self._inputs, self._sizes = model, inputs, sizes
        self._block = model.next_token
        self._graphs = CudaGraphs(model.device)
        self._captured: dict[int, Launches] = {}
        self._clearing: dict[int, Launches] = {}  # of `clear_rows`, as its launches keep the host
        self._ms: dict[int, float] = {}  # of each graph, with all rows

    def launch(self, size: int, *, is_replayed: bool) -> None:
        """Launches the block's part of the last step, whose padded size this is. is_replayed: the step was a CUDA
        graph; the block's graph reads what such steps leave, and not what steps leave whose experts are streamed."""
        batch = self._batch(size)
        if not self.keeping.is_on:
            clear = self._clearing.get(size)
            if clear is None:
                self._block.clear_rows(batch)
            else:
                clear()
            return
        replay = self._captured.get(size) if is_replayed else None
        if replay is None:
            self._model.keep_up(batch)
        else:
            replay()
        self.keeping.ms += self._ms.get(size, 0.0)

    def compile(self) -> None:
        """Compiles the kernels. Inside `compile_ahead`, where nothing is executed."""
        for size in self._inputs:
            self._model.keep_up(self._batch(size))
            self._block.clear_rows(self._batch(size))

    def capture(self) -> None:
        """Captures the graphs and times them, before the first step."""
        for size in self._sizes:
            inputs, batch = self._inputs[size], self._batch(size)
            inputs.fill_dummy(size, self._model.shape.vocab_size, is_prompt=False)
            inputs.copy()
            self._captured[size] = self._graphs.capture(
                partial(self._model.keep_up, batch), self._model.begin_keeping
            )
            if self._model.device.type == "cuda":
                self._ms[size] = _timed(self._captured[size])
            # It also clears what the capture has kept.
            self._clearing[size] = self._graphs.capture(partial(self._block.clear_rows, batch), lambda: None)

    def _batch(self, size: int) -> GpuBatch:
        path = StepPath(size, size, has_tiles=False, is_independent=False, scope=AdapterScope.NONE)
        return self._inputs[size].batch(path)


def _timed(replay: Launches) -> float:
    """Returns the milliseconds of one replay."""
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TIMED):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / TIMED
