"""The text of an answer on the page: Markdown, never HTML, whatever the model writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ask
from tests.support.http_harness import HttpServer, http_server, say


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """The real httpserver process with an engine that says what a test wants."""
    with http_server() as running:
        yield running


HOSTILE = """<img src=x onerror="document.title='broken'"><script>document.title='broken'</script>
[press](javascript:document.title='broken') ![picture](https://example.org/spy.png) [good](https://example.org/?a=1&b=2)
`<b>code</b>` **bold** _it_ snake_case_name ~~no~~ https://example.org/path. 2 * 3 * 4 \\*star\\*

> quote
> - item with `code`

| a | b \\| c |
|---|:--|
| <i>x</i> | 1 |
"""


def test_text_stays_text(page: Page, server: HttpServer) -> None:
    server.answer = say(HOSTILE)
    page.goto(server.url)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    ask(page, "<b>Hi</b>")
    turn = page.locator(".turn.model > .markdown").last
    assert page.title() == "Chat · moeserve"
    assert turn.locator("img, script, i, b").count() == 0
    assert all(url.startswith(server.url) for url in requests)
    expect(page.locator(".words")).to_have_text("<b>Hi</b>")
    hrefs = turn.locator("a").evaluate_all(
        "links => links.map((link) => [link.textContent, link.href, link.rel])"
    )
    assert hrefs == [
        [text, href, "noopener noreferrer"]
        for text, href in (
            ("picture", "https://example.org/spy.png"),
            ("good", "https://example.org/?a=1&b=2"),
            ("https://example.org/path", "https://example.org/path"),
        )
    ]
    text = turn.inner_text()
    for shown in (
        "<img src=x",
        "<script>",
        "press",
        "snake_case_name",
        "2 * 3 * 4",
        "*star*",
        "<i>x</i>",
        "b | c",
    ):
        assert shown in text
    for tag, content in (("strong", "bold"), ("em", "it"), ("del", "no"), ("blockquote li code", "code")):
        expect(turn.locator(tag)).to_have_text(content)
    expect(turn.locator("code").first).to_have_text("<b>code</b>")


MANY = 20_000
AWKWARD = {
    "stars": "**a " * MANY,
    "brackets": "[" * MANY + "](",
    "quotes": ">" * MANY,
    "backticks": "`a``b```" * MANY,
    "an open fence": "```\n" + "line\n" * MANY,
    "nested lists": "\n".join(" " * n + "- x" for n in range(200)),
    "a table": "|a" * 500 + "\n" + "|-" * 500 + "|\n" + ("|b" * 500 + "\n") * 20,
    "spaces": "a" + " " * MANY + "b" + "\n-" + " " * MANY,
}


def test_no_text_holds_the_page_up(page: Page, server: HttpServer) -> None:
    """Text that would take a careless parser minutes, or its stack: the worst took 0.4 s on a busy machine."""
    page.goto(server.url)
    script = """async (text) => {
      const { showMarkdown } = await import("./web/markdown.js");
      const box = document.createElement("div");
      const start = performance.now();
      showMarkdown(box, text);
      return [performance.now() - start, box.textContent.length];
    }"""
    for name, text in AWKWARD.items():
        milliseconds, length = page.evaluate(script, text)
        assert length > 0, name
        assert milliseconds < 3000, name


def test_streaming_keeps_the_blocks_that_are_finished(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    script = """async () => {
      const { showMarkdown } = await import("./web/markdown.js");
      const box = document.createElement("div");
      showMarkdown(box, "One\\n\\n```js\\nlet a");
      const [first] = box.children;
      showMarkdown(box, "One\\n\\n```js\\nlet a = 1;\\n```\\n\\nThree");
      const tags = [...box.children].map((node) => node.tagName);
      return [box.children[0] === first, tags, box.querySelector("pre").textContent];
    }"""
    assert page.evaluate(script) == [True, ["P", "FIGURE", "P"], "let a = 1;"]


def test_code_is_copied_as_it_is(page: Page, server: HttpServer) -> None:
    server.answer = say("```python\nif a < b:\n    print('<b>')\n```")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    ask(page)
    page.locator("figure").get_by_role("button", name="Copy").click()
    expect(page.locator("figure").get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('<b>')"
