"""The choice of a model, and how full its context is."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, Request, Route, expect

from moeserve.cli.command_line import demonstration_model
from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import Screenshot, ask
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say
from tests.support.servers.server import Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(served_model_name=f"{NAME},second-name") as running:
        yield running


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models, with memory for one of them at a time."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("large", "small"):
        shutil.copy(demonstration_model(), folder / f"{name}.gguf")
    entries = [{"model": str(folder / f"{name}.gguf")} for name in ("large", "small")]
    (folder / "models.yaml").write_text(json.dumps(entries))
    flags = ["--models-memory", "0.8", "--max-total-tokens", "4096"]
    with running_server(None, "--models-file", str(folder / "models.yaml"), *flags) as running:
        yield running


def test_the_context_that_is_used(page: Page, server: HttpServer) -> None:
    server.answer = say("one two three")
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text(NAME)
    expect(page.locator("#context")).to_be_hidden()
    ask(page, "Hi")
    figures = page.locator(".figures").inner_text()
    tokens = int(figures.split(" token")[0])
    prompt = int(figures.split("prompt ")[1].split(" token")[0])
    words = f"Context: {prompt + tokens} of {CONTEXT} tokens"
    expect(page.locator("#context-text")).to_have_text(words)
    meter = page.get_by_role("meter", name=words)
    assert abs(float(meter.evaluate("meter => meter.value")) - (prompt + tokens) / CONTEXT) < 1e-6
    page.reload()
    expect(page.locator("#context-text")).to_have_text(words)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#context")).to_be_hidden()


def test_a_context_that_is_nearly_full(page: Page, server: HttpServer) -> None:
    server.answer = say("x " * 10)
    page.goto(server.url)
    ask(page, "word " * 460)
    expect(page.locator("#context-text")).to_contain_text("nearly full, begin a new chat soon")


def test_a_second_name_is_no_choice(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text(NAME)
    expect(page.get_by_label("Model", exact=True)).to_be_hidden()
    bodies: list[Request] = []
    page.on("request", lambda request: bodies.append(request) if request.method == "POST" else None)
    server.answer = say("one")
    ask(page)
    assert "model" not in (bodies[0].post_data_json or {})


def test_the_chosen_model_is_loaded_and_answers(page: Page, several: Server, screenshot: Screenshot) -> None:
    def hold(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.continue_()

    bodies: list[dict[str, object] | None] = []
    page.route("**/v1/chat/completions", hold)
    page.goto(several.base_url)
    choice = page.get_by_label("Model", exact=True)
    expect(choice.locator("option")).to_have_text(["large — not loaded", "small — not loaded"])
    page.get_by_role("button", name="Settings").click()
    page.locator("[name=max_tokens]").fill("4")
    page.get_by_role("button", name="Save", exact=True).click()
    choice.select_option("small")
    expect(page.locator("#welcome-model strong")).to_have_text("small")
    page.get_by_label("Your message").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".waiting p")).to_contain_text("The model is loading")
    screenshot(page, "loading")
    expect(page.locator(".figures")).to_contain_text("small · ", timeout=120_000)
    expect(choice.locator("option")).to_have_text(["large — not loaded", "small"])
    assert [body["model"] for body in bodies if body] == ["small"]
    page.reload()
    expect(choice).to_have_value("small")
    httpx.post(several.base_url + "/models/unload", json={"model": "small"}, timeout=60).raise_for_status()
    while httpx.get(several.base_url + "/v1/models/small", timeout=60).json()["state"] != "unloaded":
        time.sleep(0.05)
    page.evaluate("window.dispatchEvent(new Event('focus'))")  # the user comes back from another window
    expect(choice.locator("option")).to_have_text(["large — not loaded", "small — not loaded"])
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    screenshot(page, "several")
