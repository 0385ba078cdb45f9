"""Both pages at three widths, checked with axe-core (tests/browser/vendor), and what fingers need of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import Screenshot, ask
from tests.browser.rich_text import RICH
from tests.support.nightly import nightly_after
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say

SMALL = """() => [...document.querySelectorAll("button, summary, select, input, nav a")]
  .filter((node) => node.checkVisibility() && node.type !== "checkbox")
  .map((node) => [node, node.getBoundingClientRect()])
  .filter(([, box]) => box.width < 44 || box.height < 44)
  .map(([node, box]) => `${node.outerHTML} ${box.width} x ${box.height}`)"""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def phone(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(
        viewport=ViewportSize(width=360, height=740), is_mobile=True, has_touch=True
    )
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(
    ("width", "scheme"), nightly_after(1, [(360, "light"), (768, "dark"), (1280, "light")])
)
def test_axe_finds_nothing(
    page: Page, server: HttpServer, width: int, scheme: str, screenshot: Screenshot
) -> None:
    """Headings are the model's own: their order is not looked at."""
    server.answer = say(RICH)
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(server.url)
    page.evaluate(AXE)
    expect(page.locator("#model")).to_have_text(NAME)
    findings = {"welcome": page.evaluate(FINDINGS)}
    ask(page, "What is a prime number?")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".versions")).to_have_text("‹2/2›")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    findings["answer"] = page.evaluate(FINDINGS)
    screenshot(page, f"chat-{width}")
    if page.locator("#chats").is_hidden():
        page.get_by_role("button", name="Chats").click()
    page.get_by_label("Actions for").click()
    findings["list"] = page.evaluate(FINDINGS)
    screenshot(page, f"list-{width}")
    page.get_by_role("button", name="Settings").click()
    findings["settings"] = page.evaluate(FINDINGS)
    page.goto(server.url + "/experts")
    page.evaluate(AXE)
    expect(page.locator("#model")).to_have_text(NAME)
    findings["experts"] = page.evaluate(FINDINGS)
    assert {place: found for place, found in findings.items() if found} == {}


def test_fingers_find_what_they_press(phone: Page, server: HttpServer) -> None:
    server.answer = say(RICH)
    phone.goto(server.url)
    words = phone.get_by_label("Your message")
    words.fill("One")
    words.press("Enter")
    words.type("Two")
    assert words.input_value() == "One\nTwo", "Enter breaks the line: there is no Shift to hold"
    phone.get_by_role("button", name="Send").tap()
    expect(phone.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(phone.locator(".words")).to_have_text("One\nTwo")
    assert phone.evaluate(SMALL) == []
    phone.get_by_role("button", name="Chats").tap()
    phone.get_by_label("Actions for").tap()
    assert phone.evaluate(SMALL) == []
    phone.get_by_role("button", name="Close").tap()
    phone.get_by_role("button", name="Settings").tap()
    phone.locator("[name=temperature]").fill("0.3")
    assert phone.evaluate(SMALL) == []
    phone.get_by_role("button", name="Cancel", exact=True).tap()
    phone.get_by_role("button", name="Settings").tap()
    expect(phone.locator("[name=temperature]")).to_have_value("")
    assert phone.evaluate("document.documentElement.scrollWidth") == 360
