"""What the block that drafts on a GPU computes after each step, so that it can draft: by CUDA graphs, by step size.

They are apart from the steps' graphs, because the block need not keep up with every step (`Keeping.is_on`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches, replay_ms
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath
from moeserve.worker.engines.keeping import Keeping


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
        if not self.keeping.is_on:
            clear = self._clearing.get(size)
            if clear is None:
                self._block.clear_rows(self._batch(size))
            else:
                clear()
            return
        replay = self._captured.get(size) if is_replayed else None
        if replay is None:
            self._model.keep_up(self._batch(size))
        else:
            replay()
        self.keeping.ms += self._ms.get(size, 0.0)

    def compile(self) -> None:
        """Compiles the kernels. Inside `compile_ahead`, where nothing is executed."""
        for size in self._inputs:
            self._model.keep_up(self._batch(size))
            self._block.clear_rows(self._batch(size))

    def capture_each(self) -> Iterator[None]:
        """Captures and times the graphs, one size at each `next`, between two steps. Sizes that are not captured are
        launched kernel by kernel, and count as no time."""
        for size in self._sizes:
            inputs, batch = self._inputs[size], self._batch(size)
            inputs.fill_dummy(size, self._model.shape.vocab_size, is_prompt=False, stores_kv=False)
            inputs.copy()
            self._captured[size] = self._graphs.capture(
                partial(self._model.keep_up, batch), self._model.begin_keeping
            )
            if self._model.device.type == "cuda":
                self._ms[size] = replay_ms(self._captured[size])
            self._clearing[size] = self._graphs.capture(partial(self._block.clear_rows, batch), lambda: None)
            yield

    def _batch(self, size: int) -> GpuBatch:
        path = StepPath(size, size, has_tiles=False, is_independent=False, scope=AdapterScope.NONE)
        return self._inputs[size].batch(path)
