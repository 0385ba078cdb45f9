"""A launched step, until its result is read, and how long it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import Sampled, StepPlan
from moeserve.worker.drafts.drafter import PendingTokens
from moeserve.worker.recording.step_recorder import StepRecord
from moeserve.worker.sequences import StepLayout


@dataclass(slots=True)
class LaunchedStep:
    """A launched step whose result is not read yet."""

    plan: StepPlan
    layout: StepLayout
    record: StepRecord | None
    started: float
    compiled: int  # StepResult.kernels_compiled, after all is launched
    prompt_logprobs: dict[int, list[TokenLogprob]]
    sampled: list[Sampled] = field(default_factory=list)  # results read so far
    mask_ms: dict[int, float] = field(default_factory=dict)
    mask_wait_s: float = 0.0
    drafted: list[int] | None = None  # drafts of each row; None: no drafts
    draft_ms: float = 0.0  # StepResult.draft_ms, by the host's clock
    late_ms: Callable[[], float] | None = None  # see `LateDrafts.ms`
    draft_read_ms: float = 0.0
    lagging_rows: list[int] = field(default_factory=list)
    is_launched: bool = False  # True: all of it is launched; False: all but the sampling
    is_followed: bool = False  # whether the next step is launched before this one's result is read
    pending: slice | None = None  # the group of sampled rows whose tokens are not read yet

    @property
    def pending_tokens(self) -> PendingTokens | None:
        """The rows of a step without drafts and prompts, if none of their tokens is read; else None."""
        layout = self.layout
        if self.pending is None or self.pending.start > 0 or layout.n > len(layout.rows):
            return None
        count = len(layout.sampled_rows)
        if count > self.pending.stop:
            return None
        none, places = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
        return PendingTokens(
            layout.sampled_slots, layout.sampled_rows, layout.sampled_positions, none, places[None]
        )

    def times(self, ended: float, last_ended: float, device_ms: float, layers_ms: float) -> StepTimes:
        """Returns the step's durations. ended, last_ended: when this step and the one before it ended, by the clock of
        `started`. device_ms, layers_ms: `Engine.finish`, `Engine.layers_ms`."""
        idle_ms = max(0.0, self.started - last_ended) * 1e3
        if not device_ms:
            # The host may have been launching this step when the one before it ended.
            return StepTimes((ended - max(self.started, last_ended)) * 1e3, idle_ms, self.draft_ms)
        if self.layout.drafted is None:
            return StepTimes(device_ms, idle_ms, self.draft_ms)
        # Its layers are launched when the tokens before it are known, so the device waits for the host, whenever it
        # neither drafts nor computes them; also where no draft was found, or only the step before had some. Late drafts
        # may have begun after the step before, while the host read that step's tokens; these steps' waits then have as
        # much less in the one as more in the other.
        compute_ms = (ended - self.started) * 1e3
        draft_ms = self.draft_ms if self.late_ms is None else self.late_ms()
        if self.is_followed:  # the host may have been launching the next step when this one ended
            compute_ms = min(compute_ms, device_ms)
        return StepTimes(compute_ms, idle_ms, draft_ms, max(compute_ms - draft_ms - layers_ms, 0.0))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step's durations in milliseconds; the names are those of `StepResult`."""

    compute_ms: float
    idle_ms: float
    draft_ms: float
    draft_wait_ms: float = 0.0
