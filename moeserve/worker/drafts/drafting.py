"""What the runner needs where rows may have drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moeserve.worker.drafts.drafter import Drafter
from moeserve.worker.drafts.run_sampler import DraftingEngine
from moeserve.worker.sequences import Sequences


class Drafting(NamedTuple):
    engine: DraftingEngine  # the runner's
    drafter: Callable[[Sequences], Drafter]  # made of what the runner knows of requests
