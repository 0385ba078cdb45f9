"""How fast lines begin beside other answers, in virtual time with counted CPU time."""

from __future__ import annotations

import asyncio
import time

import pytest

from moeserve.httpserver.batches.line_pace import ELSEWHERE, LINE_SHARE, LINGER_S, MAX_DEBT_S, LinePace

LINE_S = 0.002  # of CPU time


class World:
    """A pace in virtual time, whose lines take real CPU time: at once, and again at their end, `seconds` later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_busy = True
        self.spent = 0.0
        self.pace = LinePace(lambda: self.is_busy, lambda: self.now)

    def work(self, seconds: float) -> None:
        before = time.thread_time()
        while time.thread_time() < before + seconds:
            pass
        self.spent += time.thread_time() - before

    async def line(self, ending: asyncio.Event, seconds: float) -> None:
        self.work(seconds / 2)
        await ending.wait()
        self.work(seconds / 2)

    async def begun_in(self, seconds: float, cost: float = LINE_S, tick: float = 0.01) -> int:
        """Begins as many lines as may begin in virtual `seconds`; all end behind these."""
        ending, tasks, until = asyncio.Event(), [], self.now + seconds
        while self.now < until:
            if self.pace.wait_s():
                self.now += tick
            else:
                tasks.append(asyncio.create_task(self.pace.begin(self.line(ending, cost))))
                await asyncio.sleep(0)
                if not self.is_busy and len(tasks) == 100:
                    break
        ending.set()
        await asyncio.gather(*tasks)
        return len(tasks)


def test_lines_take_their_share_beside_other_answers() -> None:
    world = World()
    asyncio.run(_warm(world))
    world.spent, start = 0.0, world.now
    begun = asyncio.run(world.begun_in(20.0))
    while world.pace.wait_s():  # what their ends cost is paid, too
        world.now += 0.01
    share = world.spent * (1.0 + ELSEWHERE) / (world.now - start)
    assert 0.7 * LINE_SHARE < share <= 1.1 * LINE_SHARE
    assert begun > 10


async def _warm(world: World) -> None:
    """What a line costs is known by then."""
    for _ in range(3):
        await world.begun_in(5.0)


def test_alone_all_lines_begin_at_once() -> None:
    world = World()
    world.is_busy = False
    assert asyncio.run(world.begun_in(0.001)) == 100
    assert world.now == 0.0


def test_a_pause_between_two_requests_of_one_client_is_not_used() -> None:
    world = World()
    asyncio.run(world.begun_in(5.0))
    world.is_busy = False
    assert world.pace.wait_s() > 0.0
    world.now += LINGER_S
    assert world.pace.wait_s() == 0.0


def test_the_debt_of_a_costly_line_is_bounded() -> None:
    world = World()
    asyncio.run(world.begun_in(0.001, cost=MAX_DEBT_S))
    assert world.pace.wait_s() <= MAX_DEBT_S / LINE_SHARE


def test_a_line_that_fails_or_is_cancelled_has_been_paid() -> None:
    async def fail() -> None:
        world.work(0.01)
        raise ValueError("as lines do")

    async def run() -> None:
        with pytest.raises(ValueError, match="as lines do"):
            await world.pace.begin(fail())
        ending = asyncio.Event()
        task = asyncio.create_task(world.pace.begin(world.line(ending, 0.01)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    world = World()
    asyncio.run(run())
    assert world.pace.wait_s() == pytest.approx(0.015 * (1.0 + ELSEWHERE) / LINE_SHARE, rel=0.2)
