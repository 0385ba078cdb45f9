"""Turns: the share of the time of unadmitted requests, and their order."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from moeserve.httpserver.transport import metered, turns
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.turns import SHARE, UNPROBING_SHARE, Account, Need, Turns
from tests.support.router.virtual_time import Clock

CLOCK = Clock()


@pytest.fixture(autouse=True)
def _told_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread computes, and how long it waits, is told: a busy machine is no part of it."""
    monkeypatch.setattr(turns, "time", CLOCK)
    monkeypatch.setattr(metered, "time", CLOCK)


class Client:
    """A connection that asks again at once; each of its turns begins a request that takes `cost` seconds."""

    def __init__(
        self,
        served: list[Client],
        cost: float,
        *,
        name: str = "",
        need: Need = Need.BEGIN,
        has_key: bool = False,
        expected_s: float = 0.0,
        reconnects: bool = False,
    ) -> None:
        self.account = Account()
        self.name = name
        self.need = need
        self.expected_s = expected_s
        self._reconnects = reconnects
        self._has_key = has_key
        self.turns: Turns | None = None  # to ask again
        self._served, self._cost = served, cost

    def take_turn(self) -> bool:
        self._served.append(self)
        self.account.begin_request()
        if self._has_key:
            self.account.admit()
        CLOCK.spend(self._cost)
        self.account.end_request()
        again = copy.copy(self) if self._reconnects else self
        if self._reconnects:
            again.account = Account()
        if self.turns is not None:
            self.turns.ask(again)
        return True


def served_within(seconds: float, begin: Callable[[list[Client]], Any]) -> tuple[list[Client], float]:
    """Whose turns came, and the thread's time that they took."""
    served: list[Client] = []

    async def play() -> float:
        begin(served)
        before = CLOCK.thread_time()
        await asyncio.sleep(seconds)
        return CLOCK.thread_time() - before

    return served, CLOCK.run(play())


def flood(
    all_turns: Turns, served: list[Client], count: int, cost: float = 0.001, need: Need = Need.BEGIN
) -> None:
    for _ in range(count):
        client = Client(served, cost, need=need)
        client.turns = all_turns
        all_turns.ask(client)


@pytest.mark.parametrize(
    ("needs", "share"),
    [
        ([Need.PARSE], UNPROBING_SHARE),
        ([Need.BEGIN], UNPROBING_SHARE),
        ([Need.PARSE, Need.BEGIN], UNPROBING_SHARE),
        ([Need.PROBE], SHARE),
    ],
)
def test_unadmitted_requests_have_a_share_of_the_time_while_answers_are_under_way(
    monkeypatch: pytest.MonkeyPatch, needs: list[Need], share: float
) -> None:
    """Two cores shared with an engine: what a crowd of refusals took from it cost a stream a third of its speed."""
    monkeypatch.setattr(turns, "BURST_S", 0.0)

    def taken(*, is_busy: bool) -> float:
        mine = Turns(is_busy=lambda: is_busy)

        def begin(served: list[Client]) -> None:
            for need in needs:
                flood(mine, served, 20, need=need)

        return served_within(2.0, begin)[1] / 2.0

    assert 0.6 * share < taken(is_busy=True) < 1.3 * share
    assert taken(is_busy=False) > 3 * share


def test_a_costly_request_keeps_no_one_out_for_long() -> None:
    async def play() -> float:
        served: list[Client] = []
        mine = Turns()
        mine.ask(Client(served, 1.0))  # a second of the time is ten seconds of the share
        mine.ask(Client(served, 0.0))
        while not served:
            await asyncio.sleep(0.01)
        begun = CLOCK.now
        while len(served) < 2:
            await asyncio.sleep(0.01)
        return CLOCK.now - begun

    assert 0.1 < CLOCK.run(play()) < 0.5


def test_who_has_used_up_less_comes_first_and_a_probe_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "BURST_S", 0.0)

    async def play() -> list[str]:
        served: list[Client] = []
        mine = Turns()
        flood(mine, served, 80)
        while len(served) < 160:
            await asyncio.sleep(0.01)
        before = len(served)
        fresh = [Client(served, 0.0, name="fresh"), Client(served, 0.0, name="probe", need=Need.PROBE)]
        for client in fresh:
            mine.ask(client)
        while not all(client in served for client in fresh):
            await asyncio.sleep(0.01)
        return [client.name for client in served[before:]]

    order = CLOCK.run(play())
    assert order[0] == "probe"
    assert order.index("fresh") <= 2


@pytest.mark.parametrize("need", [Need.PARSE, Need.PROBE])
def test_a_head_and_a_probe_do_not_wait_until_the_excess_of_others_is_paid(need: Need) -> None:
    async def play() -> float:
        served: list[Client] = []
        mine = Turns()
        flood(mine, served, 80, cost=0.02)  # a fifth of a second of the share
        while len(served) < 10:
            await asyncio.sleep(0.01)
        probe = Client(served, 0.0005, need=need)
        begun = CLOCK.now
        mine.ask(probe)
        while probe not in served:
            await asyncio.sleep(0.001)
        return CLOCK.now - begun

    assert CLOCK.run(play()) < 0.05


def test_a_small_head_does_not_wait_for_large_ones_of_new_connections() -> None:
    """A connection that is closed behind its refusal, and comes again, has used up nothing either."""

    async def play() -> float:
        served: list[Client] = []
        mine = Turns()
        for _ in range(80):
            large = Client(served, 0.0005, need=Need.PARSE, expected_s=0.0003, reconnects=True)
            large.turns = mine
            mine.ask(large)
        while len(served) < 200:
            await asyncio.sleep(0.01)
        small = Client(served, 0.0001, need=Need.PARSE, expected_s=2e-6)
        begun = CLOCK.now
        mine.ask(small)
        while small not in served:
            await asyncio.sleep(0.001)
        assert len(served) < 1000
        return CLOCK.now - begun

    assert CLOCK.run(play()) < 0.1


@pytest.mark.parametrize("need", [Need.PARSE, Need.PROBE])
def test_what_others_have_read_delays_a_head_or_a_probe_by_a_tenth_of_a_second(need: Need) -> None:
    async def play() -> float:
        served: list[Client] = []
        mine = Turns()
        others = [Client(served, 0.0, need=need) for _ in range(80)]
        for other in others:
            mine.charge(other, 0.001, need)
        client = Client(served, 0.0, need=need)
        begun = CLOCK.now
        mine.ask(client)
        while client not in served:
            await asyncio.sleep(0.001)
        return CLOCK.now - begun

    assert CLOCK.run(play()) < 0.1


def test_probes_have_no_more_than_their_part_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "BURST_S", 0.0)

    def begin(served: list[Client]) -> None:
        mine = Turns()
        flood(mine, served, 20)
        flood(mine, served, 20, need=Need.PROBE)

    _, seconds = served_within(2.0, begin)
    assert 0.6 * SHARE < seconds / 2.0 < 1.5 * SHARE


def test_a_connection_that_was_closed_gets_no_turn() -> None:
    def begin(served: list[Client]) -> None:
        mine = Turns()
        for index in range(1000):
            client = Client(served, 0.0, name="left" if index % 2 else "stays")
            mine.ask(client)
            mine.ask(client)  # twice is once
            if index % 2:
                mine.forget(client)

    served, _ = served_within(1.0, begin)
    assert [client.name for client in served] == ["stays"] * 500


def test_whoever_has_a_key_waits_for_no_share() -> None:
    def begin(served: list[Client]) -> None:
        mine = Turns()
        flood(mine, served, 20)
        known = Client(served, 0.001, name="known", has_key=True)
        known.turns = mine
        mine.ask(known)

    served, _ = served_within(2.0, begin)
    of_known = sum(client.name == "known" for client in served)
    assert of_known > 100  # requests of a millisecond
    assert of_known > len(served) / 5


def test_what_a_request_takes_is_charged_until_it_is_admitted() -> None:
    async def play(*, admits: bool) -> float:
        mine = Turns()
        client = Client([], 0.0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            CLOCK.spend(0.05)
            await asyncio.sleep(0)
            if admits:
                state_of(scope).admit()
            CLOCK.spend(0.05)

        client.account.begin_request()
        await mine.metered(app, client, {}, None, None)  # type: ignore[arg-type]
        client.account.end_request()
        assert client.account.is_unadmitted != admits
        return client.account.due[client.account.need]

    assert CLOCK.run(play(admits=False)) == pytest.approx(0.1)
    assert CLOCK.run(play(admits=True)) == pytest.approx(0.0)


def test_where_all_may_ask_a_post_is_trusted_until_it_is_refused() -> None:
    account = Account(is_trusted=True)

    def after(*, is_post: bool, is_admitted: bool) -> list[bool]:
        """Whether it is unadmitted, once its head is there and once it is answered."""
        account.begin_request(may_be_trusted=is_post)
        at_first = account.is_unadmitted
        if is_admitted:
            account.admit()
        account.end_request()
        return [at_first, account.is_unadmitted]

    assert after(is_post=True, is_admitted=True) == [False, False]
    assert after(is_post=True, is_admitted=False) == [False, True]
    assert after(is_post=True, is_admitted=True) == [True, False]
    assert after(is_post=False, is_admitted=False) == [True, True]
