"""A worker of a `World` that launches the next plan, if it is there, behind the step under way, as a server's does."""

from __future__ import annotations

from moeserve.messages.steps import StepPlan, StepResult, WorkerReady
from moeserve.worker.runner import Runner
from tests.support.router_world import World


class LaunchedAhead:
    """world: whose plans it takes; None: not known yet, and nothing is launched ahead."""

    def __init__(self, runner: Runner, world: World | None = None) -> None:
        self.runner = runner
        self.world = world
        self.num_ahead = 0  # steps launched so

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
        result = runner.advance(following[0])
        runner.launch_rest()
        return result
