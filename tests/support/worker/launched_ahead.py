"""A worker of a `World` that launches the next plan, if it is there, behind the step under way, as a server's does; and
a CPU engine that plays the part of a GPU in that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeserve.messages.steps import StepPlan, StepResult, WorkerReady
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Sequences, StepLayout
from tests.support.router.router_world import World


class LaunchedAhead:
    """world: whose plans it takes; None: not known yet, and nothing is launched ahead."""

    def __init__(self, runner: Runner, world: World | None = None) -> None:
        self.runner = runner
        self.world = world
        self.num_ahead = 0  # steps launched so
        self.num_with_drafts = 0  # of those, steps that have drafts or follow one that has

    def ready(self) -> WorkerReady:
        return self.runner.ready()

    def step(self, plan: StepPlan) -> StepResult:
        runner = self.runner
        if not plan.rows:
            return runner.step(plan)
        if not runner.is_under_way:
            runner.start(plan)
        following = self.world.in_flight if self.world is not None else ()
        if not following or not runner.may_follow(following[0]):
            return runner.finish()
        self.num_ahead += 1
        self.num_with_drafts += runner._needs_result(following[0])
        result = runner.advance(following[0])
        runner.launch_rest()
        return result

    def forget(self) -> None:
        """The worker is lost: so is the step under way."""
        if self.runner.is_under_way:
            self.runner.finish()


def play_gpu(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a CPU engine's steps are launched ahead. It puts the tokens in the placeholders' places itself."""
    engine = runner.engine
    forward = engine.forward

    def computed(layout: StepLayout, sequences: Sequences, **more: Any) -> None:
        places = layout.sequence, layout.position
        placeholders = sequences.tokens[places]
        is_awaited = (placeholders < 0) & (layout.drafted is None)
        if is_awaited.any():
            known, tokens = placeholders.copy(), np.asarray(engine.sampled()[0])
            known[is_awaited] = tokens[-1 - placeholders[is_awaited]]
            sequences.tokens[places] = known
        forward(layout, sequences, **more)
        engine.finish()
        if is_awaited.any():
            sequences.tokens[places] = placeholders

    monkeypatch.setattr(engine, "forward", computed)
    monkeypatch.setattr(engine, "launches_at_once", lambda counts, drafts: True)
    monkeypatch.setattr(runner, "runs_ahead", True)
