"""Dummy steps on a GPU, with random tokens in the dummy slot, for timing before the first request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.engines.gpu.steps.cuda_graphs import Launches
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches, TilesOf
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_on
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath, StepShape
from moeserve.worker.sequences import Int32s


class DummySteps:
    def __init__(
        self,
        model: GpuDecoder,
        inputs: Mapping[int, StepInputs],
        graphs: GraphSteps,
        micro_batches: MicroBatches | None,
        cpu_stage: CpuStage | None,
        tiles_of: TilesOf,
        dummy_slot: int,
        path_of: Callable[[StepShape], StepPath],
        wait: Callable[[], None],
    ) -> None:
        """All arguments are parts of the engine. inputs: by step size. dummy_slot: a request slot without a request.
        path_of: chooses a step's execution path. wait: waits for the launched step."""
        self._model, self._inputs, self._graphs = model, inputs, graphs
        self._micro_batches, self._cpu_stage = micro_batches, cpu_stage
        self._tiles_of, self._dummy_slot = tiles_of, dummy_slot
        self._path_of, self._wait = path_of, wait

    def prompt(self, n: int, streamed: float, start: int = 0) -> Callable[[], None]:
        """Returns a function that runs a step of n random prompt tokens from position `start` on, streams the
        fraction `streamed` of the RAM experts, and waits for the step."""
        count = np.array([n], np.int32)
        path = self._path_of(StepShape(count, n))
        if path.has_tiles:
            path = path._replace(streamed=streamed)
        if path.part_rows:
            assert self._micro_batches is not None
            return self._waiting(self._micro_batches.dummy_prompt(n, start, path.part_rows))
        self._inputs[path.size].fill_dummy(n, self._model.shape.vocab_size, start)
        if self._cpu_stage is not None:
            self._cpu_stage.fill_dummy(n)
        tiles = None
        if path.has_tiles:
            zero = np.zeros(1, np.int32)
            tiles = self._tiles_of(zero, count, zero + start, zero + self._dummy_slot)
        return self._waiting(self._launches(path, tiles))

    def decode(self, rows: int) -> Callable[[], None]:
        """Returns a function that runs a decode step with `rows` rows (a step size) and waits for it. Rows beyond
        the maximal number of requests stand for drafts."""
        vocab = self._model.shape.vocab_size
        shape = StepShape(np.ones(rows, np.int32), rows)
        if rows > self._dummy_slot:
            shape = StepShape(np.array([rows], np.int32), rows, drafted=np.array([rows - 1], np.int32))
        path = self._path_of(shape)
        self._inputs[path.size].fill_dummy(rows, vocab, is_prompt=False)
        if path.part_rows:
            assert self._micro_batches is not None
            return self._waiting(self._micro_batches.dummy_decode(path, vocab))
        return self._waiting(self._launches(path, None))

    def _launches(self, path: StepPath, tiles: list[Int32s] | None) -> Launches:
        """Copies the step's inputs, which must be filled, and launches it."""
        inputs = self._inputs[path.size]
        replay = None if path.graph is None else self._graphs.find(path.graph)
        if path.graph is not None and path.graph.family == "prompts":
            inputs.fill_prompts(path.num_decode, np.zeros((0, 4), np.int32) if tiles is None else tiles[0])
        batch = inputs.batch(path, None if tiles is None else tiles_on(self._model.device, tiles))

        def launch() -> None:
            inputs.copy()
            self._model.clear_ngrams(inputs.size)
            self._model.begin(batch)
            if replay is not None:
                replay()
            else:
                self._model.forward(batch)

        return launch

    def _waiting(self, launches: Launches) -> Callable[[], None]:
        def run() -> None:
            launches()
            self._wait()

        return run
