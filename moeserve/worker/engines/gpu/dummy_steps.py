"""Steps that belong to nobody, on a GPU: for timing, before the first request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.engines.gpu.steps.graph_steps import RecordedSteps, StepKind
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_on
from moeserve.worker.engines.gpu.steps.row_counts import rounded
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.sequences import Int32s


class DummySteps:
    def __init__(
        self,
        model: GpuDecoder,
        inputs: Mapping[int, StepInputs],
        recorded: RecordedSteps,
        micro_batches: MicroBatches | None,
        cpu_stage: CpuStage | None,
        tiles_of: Callable[..., list[Int32s]],
        nobody: int,
        wait: Callable[[], None],
    ) -> None:
        """The engine's. inputs: by size. nobody: the request slot that no request has. wait: for the step that was
        launched."""
        self._model, self._inputs, self._recorded = model, inputs, recorded
        self._micro_batches, self._cpu_stage = micro_batches, cpu_stage
        self._tiles_of, self._nobody, self._wait = tiles_of, nobody, wait

    def prompt(self, n: int, streamed: float, start: int = 0) -> Callable[[], None]:
        """What runs a step of n random tokens of a prompt, from position `start` on, with this part of the RAM experts
        streamed, and waits for it."""
        inputs = self._inputs[rounded(n, self._model.sizes)]
        kind = StepKind(inputs.size, AdapterScope.NONE)
        inputs.fill_dummy(n, self._model.shape.vocab_size, start)
        parts = 1 if self._micro_batches is None else self._micro_batches.parts.get(inputs.size, 1)
        if self._micro_batches is not None and parts > 1:
            return self._waiting(self._micro_batches.dummy_prompt(n, start, parts))
        if self._cpu_stage is not None:
            self._cpu_stage.fill_dummy(n)
        if n <= SMALL_BATCH_ROWS:
            batch, replay = inputs.batch(n, None, 0.0), self._recorded.decode(kind, independent=False)
        else:
            one = np.array([n, 0], np.int32)
            tiles = self._tiles_of(one[1:], one[:1], one[1:] + start, one[1:] + self._nobody)
            batch = inputs.batch(0, tiles_on(self._model.device, tiles), streamed)
            replay = self._recorded.prompts(kind)
            if replay is not None:
                inputs.fill_prompts(0, tiles[0])

        def launch() -> None:
            inputs.copy()
            self._model.begin(batch)
            if replay is not None:
                replay()
            else:
                self._model.forward(batch)

        return self._waiting(launch)

    def decode(self, rows: int) -> Callable[[], None]:
        """The same of a recorded step of so many rows, one of the sizes."""
        vocab = self._model.shape.vocab_size
        inputs = self._inputs[rows]
        inputs.fill_dummy(rows, vocab, is_prompt=False)
        if self._micro_batches is not None and rows in self._micro_batches.decode_parts:
            return self._waiting(self._micro_batches.dummy_decode(rows, vocab))
        recorded = self._recorded.decode(StepKind(rows, AdapterScope.NONE), independent=True)
        assert recorded is not None

        def launch() -> None:
            inputs.copy()
            self._model.begin()
            recorded()

        return self._waiting(launch)

    def _waiting(self, launches: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            launches()
            self._wait()

        return run
