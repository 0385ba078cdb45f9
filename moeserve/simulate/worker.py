"""The worker in virtual time: plans in the order in which they came, each as long as the model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeserve.messages.schema import Sampled, StepPlan, StepResult
from moeserve.simulate.step_time import StepTime, load_of

ANSWER_ID, STOP_ID = 1, 2  # below every id of a prompt (workload.prompts)
_ANSWER, _STOP = Sampled(ANSWER_ID), Sampled(STOP_ID)


@dataclass(frozen=True, slots=True)
class Timing:
    """What a request meets beside the engine's own work, in seconds."""

    frontend: float  # of httpserver for each request, one after the other: parsing, tokenising, validation
    reply: float  # a token from the router to the client
    hop: float  # a plan from the router to an idle worker, and a result back
    gap: float  # between two steps, the second of which is there already
    token_cpu: float = (
        0.0  # what the other processes' work for a token takes from a step, where they share its cores
    )


class VirtualWorker:
    def __init__(self, step_time: StepTime, timing: Timing, output_lens: Mapping[int, int]) -> None:
        """`output_lens`: how long the model would make each answer, by request id; an entry is read when its
        request is first planned. Requests are told apart by the seed of their sampling, which is their id."""
        self._step_time = step_time
        self._timing = timing
        self._output_lens = output_lens
        self._last_position: dict[int, int] = {}  # by request slot: where the stop token stands
        self._free_at = 0.0
        self.busy = 0.0  # seconds of steps so far
        self.tokens = 0  # rows of them

    def submit(self, plan: StepPlan, now: float) -> tuple[float, StepResult]:
        """When the router has the result, and the result."""
        for new in plan.new_seqs:
            end = new.num_prompt + self._output_lens[new.sampling.seed] - 1
            self._last_position[new.req_slot] = end
        load = load_of(plan)
        seconds = self._step_time.of(load) + self._timing.token_cpu * load.sampled_rows
        start = max(now + self._timing.hop, self._free_at + self._timing.gap)
        idle = start - self._free_at
        self._free_at = start + seconds
        self.busy += seconds
        self.tokens += load.tokens
        last = self._last_position
        sampled = [
            _STOP if row.start + row.count == last[row.req_slot] else _ANSWER
            for row in plan.rows
            if row.sample
        ]
        result = StepResult(plan.step, sampled, {}, compute_ms=seconds * 1e3, idle_ms=idle * 1e3)
        return self._free_at + self._timing.hop, result
