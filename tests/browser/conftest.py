"""A headless Chromium, the machine's own, for the tests of the web pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from tests.support.servers.server import Server, running_server

NAMES = ("chromium", "chromium-browser", "google-chrome")  # Debian's, Ubuntu's, Google's
KEY = "sk-of-the-test"

expect.set_options(timeout=30_000)  # milliseconds: machines of CI stutter
Screenshot = Callable[[Page, str], None]


def chromium() -> str:
    """The path of the program; without one the test is skipped, in CI it fails."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"none of {', '.join(NAMES)} is installed (apt install chromium)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: while it is open, playwright has an event loop running in this thread, and nothing else may."""
    path = chromium()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh profile, as wide as a laptop. What the page logs as an error, or throws, fails the test: the failed
    requests that some tests are about excepted."""
    context = browser.new_context(viewport=ViewportSize(width=1100, height=780), color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(30_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert [one for one in problems if not one.startswith("Failed to load resource")] == []


@pytest.fixture(scope="session")
def keyed_server(tiny_model: Path) -> Iterator[Server]:
    """One that wants a key, and reads prompts in small steps."""
    with running_server(tiny_model, "--api-key", KEY, "--max-num-batched-tokens", "64") as running:
        yield running


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Screenshot:
    """Takes one, as FOLDER/name.png, where pytest was called with --screenshots FOLDER."""
    folder = request.config.getoption("--screenshots")

    def take(page: Page, name: str) -> None:
        if folder is not None:
            page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")

    return take


def ask(page: Page, text: str = "Hi") -> None:
    """Sends a message and waits for the end of the answer."""
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
