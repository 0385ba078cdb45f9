"""CUDA graphs of whole steps, by key: one launch instead of one per kernel. (Launching the 500 kernels of a prompt
step one by one takes the host 25 ms.)

All graphs are captured before the first request. A worker that replaces a lost one postpones this (`plan`), because
answers wait for it: it launches steps kernel by kernel and captures one graph after another between steps, first the
graphs that steps needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import GraphKey, StepFacts, captured_path, graph_keys


class GraphSteps:
    """Each graph computes all layers for inputs that were copied before."""

    def __init__(self, model: GpuDecoder, inputs: Mapping[int, StepInputs], facts: StepFacts) -> None:
        """inputs: by step size."""
        self._model = model
        self._inputs = inputs
        self._facts = facts
        self._graphs = CudaGraphs(model.device)
        self._captured: dict[GraphKey, Launches] = {}
        self._planned: list[GraphKey] = []  # graphs still to be captured, in order
        self._wanted: list[GraphKey] = []  # planned graphs that steps have asked for
        self.logits: dict[int, Tensor] = {}  # step size → logits of graphs that include the head
        self.late = 0  # number of steps whose graph was not captured yet

    def capture_all(self, on_captured: Callable[[int, int], object]) -> None:
        """Compiles and captures every graph, before the first step; a second call captures them anew. on_captured:
        called with the number captured and the total."""
        self._captured.clear()
        self.plan()
        total = len(self._planned)
        for done in range(total):
            on_captured(done, total)
            self.capture_next()

    def plan(self) -> None:
        """Postpones capturing to calls of `capture_next`."""
        self._planned = list(graph_keys(self._facts))

    @property
    def is_wanted(self) -> bool:
        """True if a step has asked for a graph that is not captured yet."""
        return len(self._wanted) > 0

    def capture_next(self) -> bool:
        """Captures one graph, preferably one that a step asked for. May be called only between two steps. Returns False
        if all are captured."""
        if not self._planned:
            return False
        key = self._wanted.pop(0) if self._wanted else self._planned[0]
        self._planned.remove(key)
        inputs = self._inputs[key.size]
        inputs.clear()
        inputs.copy()
        self._captured[key] = self._graphs.capture(partial(self._launch, key), self._model.begin)
        return True

    def find(self, key: GraphKey) -> Launches | None:
        """Returns the function that replays the graph; None if it is not captured."""
        found = self._captured.get(key)
        if found is None and key in self._planned:
            self.late += 1
            if key not in self._wanted:
                self._wanted.append(key)
        return found

    def _launch(self, key: GraphKey) -> None:
        inputs = self._inputs[key.size]
        self._model.forward(inputs.captured_batch(captured_path(key, self._facts)))
        if key.has_head and self._model.has_head:
            rows, _, count = inputs.head(0, key.size)
            self.logits[key.size] = self._model.logits(key.size, rows, count)
