"""Grammar checks of one tenant rest beside others' answers, once they have taken much CPU time."""

from __future__ import annotations

import asyncio

import pytest

from moeserve.grammar import check_budget
from moeserve.grammar.check_budget import BURST_S, SHARE, CheckBudget
from moeserve.grammar.checker import GrammarChecker
from moeserve.grammar.spec import Regex
from tests.conftest import TINY_MODEL
from tests.support.router.virtual_time import Clock

CLOCK = Clock()


@pytest.fixture(autouse=True)
def _told_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_budget, "time", CLOCK)


class Checks:
    """Each is over at once and takes so many seconds of a clock of its own."""

    def __init__(self, *, others: bool) -> None:
        self.others = others
        self.spent = 0.0
        self.budget = CheckBudget(lambda tenant: self.others)
        self.order: list[int] = []

    async def one(self, tenant: str, seconds: float, number: int = 0) -> float:
        """How long it waited."""
        began = CLOCK.now
        async with self.budget.turn(tenant, lambda: self.spent):
            self.spent += seconds
            self.order.append(number)
            return CLOCK.now - began


def test_a_tenant_waits_for_what_it_has_spent_and_nobody_else_does() -> None:
    async def run() -> None:
        checks = Checks(others=True)
        assert await checks.one("much", BURST_S + 0.1) == 0.0
        waiting = [asyncio.create_task(checks.one("much", 0.01, number)) for number in range(1, 4)]
        await asyncio.sleep(0)
        assert await checks.one("little", 0.1) == 0.0
        waited = await asyncio.gather(*waiting)
        assert min(waited) >= 0.1 / SHARE - 0.01
        assert waited[2] >= (0.1 + 0.01 + 0.01) / SHARE - 0.01, "one after another"
        assert checks.order == [0, 0, 1, 2, 3]

    CLOCK.run(run())


def test_nobody_waits_where_nobody_else_is_served() -> None:
    async def run() -> None:
        checks = Checks(others=False)
        for _ in range(5):
            assert await checks.one("much", 10.0) == 0.0
        checks.others = True
        waiting = asyncio.create_task(checks.one("much", 0.01))
        await asyncio.sleep(check_budget.LOOK_S)
        assert not waiting.done()
        checks.others = False
        assert await waiting < 10 * check_budget.LOOK_S, "it looks again and again"

    CLOCK.run(run())


def test_a_tenant_without_debts_is_forgotten_and_one_that_leaves_gives_its_turn_up() -> None:
    async def run() -> None:
        checks = Checks(others=True)
        await checks.one("little", 0.0)
        assert checks.budget._accounts == {}
        await checks.one("much", BURST_S + 0.02)
        gone = asyncio.create_task(checks.one("much", 0.01))
        last = asyncio.create_task(checks.one("much", 0.01))
        await asyncio.sleep(0.01)
        gone.cancel()
        assert await last >= 0.02 / SHARE - 0.02

    CLOCK.run(run())


def test_what_a_check_takes_is_charged_once() -> None:
    """The second of two equal ones has passed already."""
    checker = GrammarChecker(TINY_MODEL)
    try:
        spec = Regex("(a|b|ab){1,200}c{1,400}")
        asyncio.run(checker.check(spec, "key"))
        spent = checker._sandbox.cpu_seconds
        asyncio.run(checker.check(spec, "key"))
        assert checker._sandbox.cpu_seconds == spent
    finally:
        checker.close()
