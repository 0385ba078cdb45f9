"""What both pages show when the server is loading, dies or goes, and how they fit screens and readers. Behind the real
httpserver process stands a test's engine, which does on demand what a real one does seldom."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Request, Route, expect

from moeserve.messages.schema import (
    EngineLost,
    GenerateRequest,
    LoadProgress,
    RequestError,
    TextItem,
    TextOut,
)
from tests.browser.conftest import ask
from tests.support.faults.broken_answers import BREAKS, broken_answers
from tests.support.nightly import nightly_after
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """One that is ready, for tests that leave it so."""
    with http_server() as running:
        yield running


@pytest.fixture
def new_server() -> Iterator[HttpServer]:
    """One that is not ready yet, for tests that take it through its states."""
    running = HttpServer()
    try:
        running.start_message()
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("path", nightly_after(1, ["/", "/experts"]))
def test_a_page_waits_for_the_model(page: Page, new_server: HttpServer, path: str) -> None:
    new_server.send(LoadProgress("weights", 2, 5))
    page.goto(new_server.url + path)
    banner = page.locator("#banner")
    expect(banner).to_have_text("The model is loading: weights, 40%")
    new_server.engine_ready()
    expect(banner).to_be_hidden()
    expect(page.locator("#model")).to_have_text(NAME)


@pytest.mark.slow
def test_an_answer_that_fails_keeps_what_it_has_said(page: Page, new_server: HttpServer) -> None:
    def break_off(server: HttpServer, request: GenerateRequest) -> None:
        server.send(TextOut([TextItem(request.id, "So far", [5])]))
        server.send(RequestError(request.id, 500, "the model produced non-finite logits for this request"))

    new_server.engine_ready()
    new_server.answer = break_off
    page.goto(new_server.url)
    ask(page)
    turn = page.locator(".turn.model")
    expect(turn.locator("> .markdown")).to_have_text("So far")
    expect(turn.get_by_role("alert")).to_have_text("the model produced non-finite logits for this request")
    new_server.send(EngineLost("the worker was killed"))
    page.reload()
    expect(page.locator("#banner")).to_have_text("The engine is restarted: the worker was killed")


def test_a_server_that_is_gone_is_named_as_the_cause(page: Page, new_server: HttpServer) -> None:
    new_server.engine_ready()
    page.goto(new_server.url)
    expect(page.locator("#model")).to_have_text(NAME)
    page.wait_for_load_state("networkidle")  # the page asks for more than the model's name
    new_server.process.kill()
    new_server.process.wait(30)
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")


@pytest.mark.parametrize("path", ["v1/models", "v1/mcp/servers"])
def test_answers_that_break_off_are_no_faults_of_the_page(page: Page, server: HttpServer, path: str) -> None:
    """What the page asks for besides an answer, and the answer itself. The fixture fails where the page throws."""
    asked: list[Request] = []
    ended: list[Request] = []
    addresses: list[str] = []  # the last of them is used

    def break_it(route: Route) -> None:
        asked.append(route.request)
        if path == "v1/models" and len(asked) == 1:
            route.continue_()  # the page waits for the model; the list of models is its second request
        else:
            route.continue_(url=addresses[-1])

    for event in ("requestfailed", "requestfinished"):
        page.on(event, lambda request: ended.append(request))
    page.route(f"**/{path}", break_it)
    page.route("**/v1/chat/completions", lambda route: route.continue_(url=addresses[-1]))
    with broken_answers() as broken:
        for number, kind in enumerate(BREAKS, start=1):
            addresses.append(broken + kind)
            asked.clear()
            page.goto(server.url)
            while len(asked) < (2 if path == "v1/models" else 1) or asked[-1] not in ended:
                page.wait_for_timeout(20)
            ask(page)
            expect(page.get_by_role("alert")).to_have_count(number)


WIDE = f"```\n{'x' * 300}\n```\n\n{'y' * 300}\n\n|{'wide column|' * 30}\n{'|-' * 30}|"


@pytest.mark.parametrize("path", nightly_after(1, ["/", "/experts"]))
def test_a_page_fits_a_phone_in_light_and_dark(page: Page, server: HttpServer, path: str) -> None:
    server.answer = say(WIDE)
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(server.url + path)
    expect(page.locator("#model")).to_have_text(NAME)
    if path == "/":
        ask(page, "z" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    brightness = []
    for _ in ("light", "dark"):
        page.get_by_role("button", name="Theme").click()
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness.append(
            sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(", ")[:3])
        )
    assert brightness[0] > 600
    assert brightness[1] < 150


@pytest.mark.slow
@pytest.mark.parametrize("path", nightly_after(1, ["/", "/experts"]))
def test_every_control_has_a_name(page: Page, server: HttpServer, path: str) -> None:
    """As a screen reader gets it; the dialogs too."""
    page.goto(server.url + path)
    for dialog in (None, "Settings", "Key") if path == "/" else (None, "Key"):
        if dialog is not None:
            page.get_by_role("button", name=dialog, exact=True).click()
        for line in page.locator("body").aria_snapshot().splitlines():
            role = line.strip().removeprefix("- ").split(":")[0].split(" ")[0]
            if role in {"button", "textbox", "combobox", "spinbutton", "checkbox", "link", "img", "dialog"}:
                assert '"' in line, f"{path}, {dialog}: {line}"
        page.keyboard.press("Escape")
