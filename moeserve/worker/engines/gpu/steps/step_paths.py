"""The paths of an engine's steps: what is known about the engine, and `path_of` with a cache for decode steps."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.engines.gpu.steps.step_path import StepFacts, StepPath, StepShape, path_of


class StepPaths:
    """Owns `facts`, which measurements before the first request change."""

    def __init__(self, facts: StepFacts) -> None:
        self.facts = facts
        self._decode: dict[tuple[object, ...], StepPath] = {}  # by the key of `path`

    def path(self, step: StepShape) -> StepPath:
        """Returns the path of a step: see `path_of`. It is cached for steps with one row per sequence: their host time
        matters, and each needs its path twice."""
        if step.num_rows != len(step.counts):
            return path_of(step, self.facts)
        key = step[1:-1]  # omits the counts, which are all 1, and the drafts, which are absent
        path = self._decode.get(key)
        if path is None:
            path = self._decode[key] = path_of(step, self.facts)
        return path

    def stream(self, streaming: Streaming) -> None:
        """Sets the fraction of RAM experts that steps with prompts stream."""
        self._know(replace(self.facts, streaming=streaming))

    def divide_decode_steps(self, sizes: Set[int]) -> None:
        """Makes decode steps of these sizes run in parts, others whole."""
        self._know(replace(self.facts, decode_parts=frozenset(sizes)))

    def divide_prompts(self, size: int, parts: int) -> None:
        """Makes steps of this size with prompts run in `parts` parts."""
        self._know(replace(self.facts, prompt_parts={**self.facts.prompt_parts, size: parts}))

    def _know(self, facts: StepFacts) -> None:
        self.facts = facts
        self._decode.clear()
