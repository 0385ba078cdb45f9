"""HTML and SVG of a model run in a frame that reaches neither the page nor the network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, FrameLocator, Page, expect

from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import Screenshot, ask
from tests.support.servers.http_harness import HttpServer, http_server, say

COUNTER = """```html
<!doctype html>
<title>Counter</title>
<style>button { background: rgb(1, 2, 3); color: white }</style>
<button onclick="this.textContent = Number(this.textContent) + 1">1</button>
```
"""
CIRCLE = """```xml
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><circle r="4" cx="4" cy="4"/></svg>
```
"""
# Every attempt is noted; the result is read out of the frame.
HOSTILE = """```html
<p id="log"></p>
<script>
const log = (text) => document.getElementById("log").append(text + ";");
const attempt = (name, act) => { try { act(); log(name + " done"); } catch { log(name + " refused"); } };
attempt("parent", () => parent.document.title);
attempt("storage", () => localStorage.length);
attempt("cookie", () => document.cookie);
attempt("top", () => { top.location = "https://example.org/"; });
attempt("worker", () => { new Worker("data:text/javascript,").onerror = () => log("worker refused"); });
log(origin);
fetch("/v1/models").then(() => log("fetch done"), () => log("fetch refused"));
new Image().src = "https://example.org/spy.png";
</script>
<img src="/spy.png">
<link rel="stylesheet" href="https://example.org/spy.css">
<form action="/spy" target="_self"><input name="a"></form>
<iframe src="/experts"></iframe>
```
"""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def preview(page: Page, server: HttpServer, text: str) -> FrameLocator:
    server.answer = say(text)
    page.goto(server.url)
    ask(page)
    page.get_by_role("button", name="Preview").click()
    return page.frame_locator("#artifact iframe")


def test_html_is_shown_and_its_scripts_run(page: Page, server: HttpServer, screenshot: Screenshot) -> None:
    frame = preview(page, server, COUNTER)
    button = frame.get_by_role("button")
    button.click()
    expect(button).to_have_text("2")
    expect(button).to_have_css("background-color", "rgb(1, 2, 3)")
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    screenshot(page, "preview")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "preview.html"
    assert download.value.path().read_text() == COUNTER.removeprefix("```html\n").removesuffix("\n```\n")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(page.locator("iframe")).to_have_count(0)


def test_a_drawing_is_shown_and_other_code_is_not(page: Page, server: HttpServer) -> None:
    frame = preview(page, server, CIRCLE + "```python\nprint('<svg>')\n```\n```xml\n<note/>\n```")
    expect(frame.locator("circle")).to_be_visible()
    assert page.locator("figure").count() == 3


def test_a_preview_reaches_nothing(browser: Browser, server: HttpServer) -> None:
    """The page of a context of its own: what the frame is refused is in its console, as it should be."""
    context = browser.new_context()
    page = context.new_page()
    frame = preview(page, server, HOSTILE)
    log = frame.locator("#log")
    expect(log).to_contain_text("fetch refused")
    expect(log).to_contain_text("parent refused;storage refused;cookie refused;top refused;")
    expect(log).to_contain_text("worker refused;")
    expect(log).to_contain_text("null;")  # its origin
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    frame.locator("form").evaluate("form => form.submit()")
    inner = frame.frame_locator("iframe").locator("body")
    assert "Experts" not in inner.inner_text()
    frame.locator("body").evaluate("() => { location = 'https://example.org/?secret'; }")
    page.wait_for_timeout(500)
    assert [url for url in requests if not url.startswith(server.url)] == []
    assert page.url == server.url + "/"
    context.close()
