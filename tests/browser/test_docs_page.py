"""The page of the API at /docs, in a real browser."""

from __future__ import annotations

import re
from typing import Literal

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import KEY, Screenshot
from tests.support.nightly import nightly_after
from tests.support.servers.server import Server


def test_every_operation_is_listed_and_can_be_tried(
    page: Page, server: Server, screenshot: Screenshot
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.base_url + "/docs")
    paths = httpx.get(server.base_url + "/openapi.json").json()["paths"]
    expect(page.locator(".opblock")).to_have_count(sum(len(methods) for methods in paths.values()))
    screenshot(page, "docs")
    page.locator(".opblock-summary", has=page.get_by_text("/version", exact=True)).first.click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response .response-col_status").first).to_contain_text("200")
    expect(page.locator(".live-responses-table")).to_contain_text('"version"')
    assert [url for url in asked if not url.startswith((server.base_url, "data:"))] == []


@pytest.mark.parametrize("scheme", nightly_after(1, ["light", "dark"]))
def test_axe_finds_nothing(page: Page, server: Server, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(server.base_url + "/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []


@pytest.mark.slow
def test_it_is_as_dark_as_the_other_pages(page: Page, server: Server) -> None:
    """As the browser wants it, and then as it was chosen on another page."""

    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    page.emulate_media(color_scheme="dark")
    page.goto(server.base_url + "/docs")
    expect(page.locator("html")).to_have_class("dark-mode")
    assert brightness() < 150
    page.goto(server.base_url + "/experts")
    page.get_by_role("button", name="Theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.goto(server.base_url + "/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    expect(page.locator("html")).not_to_have_class("dark-mode")


@pytest.mark.slow
def test_a_server_with_keys_asks_for_one(page: Page, keyed_server: Server) -> None:
    page.goto(keyed_server.base_url + "/docs")
    expect(page.get_by_role("alert").first).to_contain_text("API key")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use it").click()
    expect(page.locator(".opblock").first).to_be_visible()
    page.locator(".opblock-summary", has=page.get_by_text("/v1/models", exact=True)).first.click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response .response-col_status").first).to_contain_text("200")
