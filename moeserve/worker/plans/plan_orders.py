"""Executes the orders of a plan that come before its rows: pages moved between the tiers, states copied, grammars
kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from moeserve.messages.pages import PageReport
from moeserve.messages.steps import StepPlan
from moeserve.worker.engines.engine import Engine
from moeserve.worker.engines.wrong_slots import WrongSlots
from moeserve.worker.tiers.page_mover import PageMover


class PlanOrders:
    """Owns `grammars`: texts of plans, by number, until a plan drops them."""

    def __init__(
        self,
        engine: Engine,
        pages: PageMover | None,
        wrong: WrongSlots | None,
        settle_drafter: Callable[[], None] = lambda: None,
    ) -> None:
        """pages: the tiers behind the KV pool; None: there are none. wrong: None if no weights are on disk.
        settle_drafter: writes the KV that a drafter has not written yet."""
        self._settle_drafter = settle_drafter
        self._engine = engine
        self._pages = pages
        self._wrong = wrong
        self.grammars: dict[int, str] = {}

    def execute(self, plan: StepPlan) -> None:
        """Executes the plan's orders. Pages are written before states are copied, and loaded afterwards. States are
        settled before they are written or their slots are loaded; a plan with rows settles them later if it does
        neither, because a GPU waits for its drafts."""
        pages = self._pages if plan.pages is not None else None
        if pages is not None or not plan.rows:
            self._engine.settle_states()
            self._settle_drafter()
        if pages is not None and plan.pages is not None:
            pages.write(plan.pages, self._wrong)
        if plan.state_copies:
            copies = np.frombuffer(plan.state_copies, np.int32).reshape(-1, 2)
            self._engine.copy_states(copies)
            if self._wrong is not None:
                self._wrong.states_copied(copies)
        if pages is not None and plan.pages is not None:
            pages.load(plan.pages)
            if self._wrong is not None:
                self._wrong.loaded(plan.pages)
        self.grammars |= plan.grammars
        for number in plan.dropped_grammars:
            del self.grammars[number]

    def page_report(self, *, may_wait: bool = False) -> PageReport | None:
        """Returns what the tiers did since the last report; None without tiers. may_wait: see `PageMover.report`."""
        return None if self._pages is None else self._pages.report(may_wait=may_wait)

    def router_lost(self) -> None:
        """Forgets the plans so far."""
        self.grammars.clear()
        if self._pages is not None:
            self._pages.start_again()

    @contextmanager
    def without_pages(self) -> Iterator[None]:
        """While this context is open, plans are executed as if there were no tiers."""
        pages, self._pages = self._pages, None
        try:
            yield
        finally:
            self._pages = pages
