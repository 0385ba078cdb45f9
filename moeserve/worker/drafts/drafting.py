"""The parts that the runner needs for drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moeserve.worker.drafts.drafter import Drafter, LateDrafts, Reading
from moeserve.worker.drafts.run_sampler import DraftingEngine
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.sequences import Sequences


class Drafting(NamedTuple):
    engine: DraftingEngine  # the runner's engine
    drafter: Callable[[Sequences], Drafter]  # builds the drafter from the runner's record of requests
    reading: Reading  # of texts, by a drafting model
    keeping: Keeping  # up with texts, by the model's own block on the CPU
    most: int | None = None  # drafts of a step; None: as many as the router grants
    late: LateDrafts | None = None  # drafts that a GPU computes meanwhile; None: there are none
