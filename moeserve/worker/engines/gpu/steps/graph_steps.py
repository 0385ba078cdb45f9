"""The CUDA graphs of whole steps, by key: one start in place of the launches of all kernels. (Launched one by one, the
500 kernels of a step with prompts take the host 25 ms.)

All graphs are captured before the first request. A worker in the place of one that was lost is waited for: it puts that
off (`plan`), launches kernel by kernel what it needs meanwhile, and captures one graph after another between its steps,
first the graphs that steps have asked for.
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
    """Each graph computes all layers of inputs that have been copied."""

    def __init__(self, model: GpuDecoder, inputs: Mapping[int, StepInputs], facts: StepFacts) -> None:
        """inputs: by size."""
        self._model = model
        self._inputs = inputs
        self._facts = facts
        self._graphs = CudaGraphs(model.device)
        self._captured: dict[GraphKey, Launches] = {}
        self._planned: list[GraphKey] = []  # still to be captured, in this order
        self._wanted: list[GraphKey] = []  # of these, the graphs that steps have asked for
        self.logits: dict[int, Tensor] = {}  # by size: where graphs with the head leave them
        self.late = 0  # steps that asked for a graph that was still to be captured

    def capture_all(self, on_captured: Callable[[int, int], object]) -> None:
        """Compiles and captures every graph. Before the first step; again, it captures them anew. on_captured: hears
        how many there are so far, and in all."""
        self._captured.clear()
        self.plan()
        total = len(self._planned)
        for done in range(total):
            on_captured(done, total)
            self.capture_next()

    def plan(self) -> None:
        """`capture_next` then captures every graph."""
        self._planned = list(graph_keys(self._facts))

    @property
    def is_wanted(self) -> bool:
        """A step has asked for a graph that is still to be captured."""
        return len(self._wanted) > 0

    def capture_next(self) -> bool:
        """Captures a graph, one that was asked for if there is any. Between two steps. False: all are captured."""
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
        """The graph's replay; None: it is not captured (yet)."""
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
