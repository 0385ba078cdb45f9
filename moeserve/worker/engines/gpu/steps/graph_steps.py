"""The steps of a model that are recorded, by kind: one start in place of the launches of all kernels.

All are recorded before the first request. A worker in the place of one that was lost is waited for: it puts that off
(`plan`), launches kernel by kernel what it needs meanwhile, and records one step after another between those that it
runs, first what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

from torch import Tensor

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphRecorder, Launches
from moeserve.worker.engines.gpu.steps.row_counts import rounded
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs


class StepKind(NamedTuple):
    size: int
    scope: AdapterScope  # of the adapters that rows ask for


# Steps of rows that are independent of one another, and of small batches of which some rows are of one prompt, both
# with the head; and steps with prompts, without it: launched one by one, their 500 kernels take the host 25 ms.
_Family = Literal["decode", "small", "prompts"]


class _Name(NamedTuple):
    family: _Family
    kind: StepKind


class RecordedSteps:
    """Each computes all layers of inputs that have been copied."""

    def __init__(self, model: GpuDecoder, inputs: Mapping[int, StepInputs]) -> None:
        """inputs: by size; those with room for tiles are of recorded steps with prompts, too."""
        self._model = model
        self._inputs = inputs
        self._recorder = CudaGraphRecorder(model.device)
        self.scopes = [AdapterScope.NONE, *(() if model.adapters is None else model.adapters.scopes)]
        self._recorded: dict[_Name, Launches] = {}
        self._planned: list[_Name] = []  # still to be recorded, in this order
        self._wanted: list[_Name] = []  # of these, those that steps have asked for
        self.logits: dict[int, Tensor] = {}  # where each size of decode steps leaves them
        self.late = 0  # steps that asked for one that was still to be recorded

    def record(self, max_num_seqs: int, on_recorded: Callable[[int, int], object]) -> None:
        """Compiles and records the decode steps of all sizes up to max_num_seqs, and those with prompts. Before the
        first step; again, it records them anew. on_recorded: how many there are so far, and in all."""
        self._recorded.clear()
        self.plan(max_num_seqs)
        total = len(self._planned)
        for done in range(total):
            on_recorded(done, total)
            self.record_next()

    def plan(self, max_num_seqs: int) -> None:
        """What `record_next` then records."""
        for kind in map(StepKind._make, product(reversed(self.decode_sizes(max_num_seqs)), self.scopes)):
            self._planned.append(_Name("decode", kind))
            if 1 < kind.size <= SMALL_BATCH_ROWS:
                self._planned.append(_Name("small", kind))
        with_prompts = [size for size, inputs in self._inputs.items() if inputs.max_tiles]
        for kind in map(StepKind._make, product(with_prompts, self.scopes)):
            self._planned.append(_Name("prompts", kind))

    @property
    def is_wanted(self) -> bool:
        """A step has asked for one that is still to be recorded."""
        return len(self._wanted) > 0

    def record_next(self) -> bool:
        """Records a step, one that was asked for if there is any. Between two steps. False where all are."""
        if not self._planned:
            return False
        name = self._wanted.pop(0) if self._wanted else self._planned[0]
        self._planned.remove(name)
        inputs = self._inputs[name.kind.size]
        inputs.clear()
        inputs.copy()
        launch = {"decode": self._decode_step, "small": self._small_step, "prompts": self._prompt_step}
        launches = partial(launch[name.family], name.kind)
        self._recorded[name] = self._recorder.record(launches, self._model.begin)
        return True

    def covers(self, rows: int, *, has_prompts: bool) -> bool:
        """Whether steps of so many rows are recorded, or will be."""
        largest = max((size for size, inputs in self._inputs.items() if inputs.max_tiles), default=0)
        return not has_prompts or rows <= max(SMALL_BATCH_ROWS, largest)

    def decode_sizes(self, max_num_seqs: int) -> list[int]:
        """Of the decode steps that are recorded."""
        most = rounded(max_num_seqs, self._model.sizes)
        return [size for size in self._model.head_sizes if size <= most]

    def decode(self, kind: StepKind, *, independent: bool) -> Launches | None:
        """Rows that attend each by itself, all sampled; independent: none reads another's KV of the step."""
        return self._find(_Name("decode" if independent else "small", kind))

    def prompts(self, kind: StepKind) -> Launches | None:
        """Some rows that attend each by itself, and others in tiles."""
        return self._find(_Name("prompts", kind))

    def _find(self, name: _Name) -> Launches | None:
        found = self._recorded.get(name)
        if found is None and name in self._planned:
            self.late += 1
            if name not in self._wanted:
                self._wanted.append(name)
        return found

    def _decode_step(self, kind: StepKind, *, independent: bool = True) -> None:
        size, inputs = kind.size, self._inputs[kind.size]
        self._model.forward(inputs.batch(size, None, 0.0, rows_independent=independent, scope=kind.scope))
        if self._model.has_head:
            rows, _, count = inputs.head(0, size)
            self.logits[size] = self._model.logits(size, rows, count)

    def _small_step(self, kind: StepKind) -> None:
        self._decode_step(kind, independent=False)

    def _prompt_step(self, kind: StepKind) -> None:
        self._model.forward(self._inputs[kind.size].recorded_prompts(kind.scope))
