"""What scrapes of the metrics may take of the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from moeserve.httpserver.observability import shared_scrape
from moeserve.httpserver.observability.shared_scrape import SHARE, SharedScrape
from tests.support.router.virtual_time import Clock

COST_S = 0.01


class Rendered:
    """Each text is the time at which it was begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.count = 0
        monkeypatch.setattr(shared_scrape, "time", self.clock)

    def __call__(self) -> float:
        self.count += 1
        begun = self.clock.now
        self.clock.spend(COST_S)
        return begun


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Rendered:
    return Rendered(monkeypatch)


async def _ask(scrape: SharedScrape[float], clock: Clock, times: int) -> None:
    for _ in range(times):
        asked = clock.now
        assert await scrape.text() >= asked, "what had happened before the scrape is in its text"


def test_eighty_who_ask_without_end_get_their_share_of_the_thread(rendered: Rendered) -> None:
    scrape = SharedScrape(rendered)

    async def crowd() -> None:
        await asyncio.gather(*(_ask(scrape, rendered.clock, 50) for _ in range(80)))

    rendered.clock.run(crowd())
    assert rendered.count == 50
    assert rendered.clock.thread_seconds <= SHARE * rendered.clock.now + COST_S


def test_a_scrape_alone_does_not_wait(rendered: Rendered) -> None:
    scrape = SharedScrape(rendered)

    async def now_and_then() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            asked = rendered.clock.now
            assert await scrape.text() == asked

    rendered.clock.run(now_and_then())


def test_one_who_leaves_takes_the_text_from_no_one(rendered: Rendered) -> None:
    scrape = SharedScrape(rendered)

    async def leave() -> None:
        await scrape.text()
        first = asyncio.create_task(scrape.text())
        second = asyncio.create_task(scrape.text())
        await asyncio.sleep(0)
        first.cancel()
        assert await second > 0

    rendered.clock.run(leave())


def test_a_text_that_fails_is_tried_anew(monkeypatch: pytest.MonkeyPatch, rendered: Rendered) -> None:
    texts: Iterator[ValueError | str] = iter([ValueError("not yet"), "text"])

    def render() -> str:
        text = next(texts)
        if isinstance(text, ValueError):
            raise text
        return text

    scrape = SharedScrape(render)

    async def ask() -> str:
        with pytest.raises(ValueError, match="not yet"):
            await scrape.text()
        return await scrape.text()

    assert rendered.clock.run(ask()) == "text"
