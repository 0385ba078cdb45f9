"""What the block that drafts on a GPU computes after each step, so that it can draft: by CUDA graphs, by step size.

They are apart from the steps' graphs, because the block need not keep up with every step (`Keeping.is_on`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches, replay_ms
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.sequences import Int32s

# KV slots that are zeroed together while the block leaves the texts: a launch at each step costs 0.01 to 0.02 ms.
MOST_LEFT = 256


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
        self._ms: dict[int, float] = {}  # of each graph, with all rows
        self._left: list[Int32s] = []  # KV slots of steps that the block left
        self._num_left = 0

    def launch(self, size: int, kv_slots: Int32s, *, is_replayed: bool) -> None:
        """Launches the block's part of the last step, whose padded size this is. kv_slots: int32 [rows], those of its
        rows. is_replayed: the step was a CUDA graph; the block's graph reads what such steps leave, and not what steps
        leave whose experts are streamed."""
        if not self.keeping.is_on:
            self._leave(size, kv_slots)
            return
        self.settle()
        replay = self._captured.get(size) if is_replayed else None
        if replay is None:
            self._model.keep_up(self._batch(size))
        else:
            replay()
        self.keeping.ms += self._ms.get(size, 0.0)

    def _leave(self, size: int, kv_slots: Int32s) -> None:
        """Zeroes the KV slots of a step, which have the rows of other requests: those of few rows later, together."""
        if len(kv_slots) > MOST_LEFT:
            batch = self._batch(size)
            self._block.clear_rows(batch.kv_slots, batch.count)
            return
        if self._num_left + len(kv_slots) > MOST_LEFT:
            self.settle()
        self._left.append(kv_slots)
        self._num_left += len(kv_slots)

    def settle(self) -> None:
        """Launches the zeroing of all left KV slots. Call it before the block reads them, and before tiers do."""
        if self._left:
            left, self._left, self._num_left = np.concatenate(self._left), [], 0
            self._clear(left)

    def _clear(self, kv_slots: Int32s) -> None:
        brought = np.zeros((2, MOST_LEFT), np.int32)
        brought[0, 0], brought[1, : len(kv_slots)] = len(kv_slots), kv_slots
        on_device = pinned_copy(brought, self._model.device)
        self._block.clear_rows(on_device[1], on_device[0, :1])

    def compile(self) -> None:
        """Compiles the kernels. Inside `compile_ahead`, where nothing is executed."""
        for size in self._inputs:
            self._model.keep_up(self._batch(size))
            batch = self._batch(size)
            self._block.clear_rows(batch.kv_slots, batch.count)
        self._clear(np.zeros(1, np.int32))

    def capture_each(self) -> Iterator[None]:
        """Returns an iterator that captures and times the graphs, one step size at each `next`, between two steps.
        Sizes that are not captured are launched kernel by kernel, and count as no time."""
        for size in self._sizes:
            inputs, batch = self._inputs[size], self._batch(size)
            inputs.fill_dummy(size, self._model.shape.vocab_size, is_prompt=False, stores_kv=False)
            inputs.copy()
            self._captured[size] = self._graphs.capture(
                partial(self._model.keep_up, batch), self._model.begin_keeping
            )
            if self._model.device.type == "cuda":
                self._ms[size] = replay_ms(self._captured[size])
            yield

    def _batch(self, size: int) -> GpuBatch:
        path = StepPath(size, size, has_tiles=False, is_independent=False, scope=AdapterScope.NONE)
        return self._inputs[size].batch(path)
