"""The steps of a model that are recorded, by kind: one start in place of the launches of all kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import NamedTuple

from torch import Tensor

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.graphs import CudaGraphRecorder, Launches
from moeserve.worker.engines.row_counts import rounded
from moeserve.worker.engines.step_inputs import StepInputs


class StepKind(NamedTuple):
    size: int
    scope: AdapterScope  # of the adapters that rows ask for


class RecordedSteps:
    """Each copies its inputs, and computes all layers."""

    def __init__(self, model: GpuDecoder, inputs: Mapping[int, StepInputs]) -> None:
        """inputs: by size; those with room for tiles are of recorded steps with prompts, too."""
        self._model = model
        self._inputs = inputs
        self.scopes = [AdapterScope.NONE, *(() if model.adapters is None else model.adapters.scopes)]
        # Steps of rows that are independent of one another, and of small batches of which some rows are of one prompt,
        # both with the head; and where each leaves its logits, by size.
        self._decode: dict[StepKind, Launches] = {}
        self._small: dict[StepKind, Launches] = {}
        self.logits: dict[int, Tensor] = {}
        # Steps with prompts, without the head: launched one by one, their 500 kernels take the host 25 ms.
        self._prompts: dict[StepKind, Launches] = {}

    def record(self, max_num_seqs: int) -> None:
        """Compiles and records the decode steps of all sizes up to max_num_seqs, and those with prompts. Before the
        first step."""
        recorder = CudaGraphRecorder(self._model.device)
        sizes = self.decode_sizes(max_num_seqs)
        for kind in map(StepKind._make, product(reversed(sizes), self.scopes)):
            for recorded, independent in ((self._decode, True), (self._small, False)):
                if independent or 1 < kind.size <= SMALL_BATCH_ROWS:
                    launches = partial(self._decode_step, kind, independent)
                    recorded[kind] = recorder.record(launches, self._model.begin)
        with_prompts = [size for size, inputs in self._inputs.items() if inputs.max_tiles]
        for kind in map(StepKind._make, product(with_prompts, self.scopes)):
            self._prompts[kind] = recorder.record(partial(self._prompt_step, kind), self._model.begin)

    def decode_sizes(self, max_num_seqs: int) -> list[int]:
        """Of the decode steps that are recorded."""
        most = rounded(max_num_seqs, self._model.sizes)
        return [size for size in self._model.head_sizes if size <= most]

    def decode(self, kind: StepKind, *, independent: bool) -> Launches | None:
        """Rows that attend each by itself, all sampled; independent: none reads another's KV of the step."""
        return (self._decode if independent else self._small).get(kind)

    def prompts(self, kind: StepKind) -> Launches | None:
        """Some rows that attend each by itself, and others in tiles."""
        return self._prompts.get(kind)

    def _decode_step(self, kind: StepKind, independent: bool) -> None:
        size, inputs = kind.size, self._inputs[kind.size]
        inputs.copy()
        self._model.forward(inputs.batch(size, None, 0.0, rows_independent=independent, scope=kind.scope))
        if self._model.has_head:
            rows, _, count = inputs.head(0, size)
            self.logits[size] = self._model.logits(size, rows, count)

    def _prompt_step(self, kind: StepKind) -> None:
        inputs = self._inputs[kind.size]
        inputs.copy()
        self._model.forward(inputs.recorded_prompts(kind.scope))
