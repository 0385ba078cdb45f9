"""The text of an answer on the page: Markdown, never HTML, whatever the model writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ask
from tests.browser.rich_text import RICH
from tests.support.servers.http_harness import HttpServer, http_server, say


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
    "formulas that never end": "\\(" * MANY + "$$\n" * MANY,
    "formulas in one another": "$$" + "\\frac{1}{" * 300 + "$$",
    "macros": r"$\def\a{\b\b}\def\b{\c\c}\def\c{\d\d}\def\d{\a\a}\a$",
    "code in colours": "```cpp\n" + "a<b" * 15_000 + "\n```",
    "references": "".join(f"[{n}]: https://example.org\n" for n in range(2000)) + "\n[1]",
    "spaces": "a" + " " * MANY + "b" + "\n-" + " " * MANY,
}


@pytest.mark.slow
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


def test_what_models_write_is_shown(page: Page, server: HttpServer) -> None:
    server.answer = say(RICH)
    page.goto(server.url)
    ask(page)
    turn = page.locator(".turn.model > .markdown")
    expect(turn.locator("ol > li > ul > li.task > input")).to_have_count(2)
    assert [box.is_checked() for box in turn.locator("li.task input").all()] == [True, False]
    expect(turn.locator("strong em")).to_have_text("and")
    aligned = turn.locator("td").evaluate_all(
        "cells => cells.map((cell) => getComputedStyle(cell).textAlign)"
    )
    assert aligned == ["left", "center", "right"]
    formulas = turn.locator(".math annotation").all_text_contents()
    assert [formula.split("\n")[0] for formula in formulas] == [
        "a_1 * b_2 * c",
        r"\vec{x}_1",
        r"\zeta(s) = \sum_{n=1}^\infty \frac{1}{n^s}",
        r"\begin{align}",
    ]
    assert turn.locator(".math.display .katex-html").count() == 2
    assert turn.locator(".katex-html svg").count() == 3  # the arrow, the line, the root
    assert turn.locator("[data-style]").count() == 0
    for text in ("It costs $5 and then $6; $x$ is code.", r"$\undefinedmacro$ and [ not closed"):
        expect(turn).to_contain_text(text)
    expect(turn.locator("pre .hljs-keyword")).to_have_text(["def", "return"])
    font = page.evaluate("document.fonts.check('16px KaTeX_Main')")
    assert font, "KaTeX's fonts come from this server"


HOSTILE_FORMULAS = r"""
$\href{javascript:document.title='broken'}{press}$ $\url{javascript:1}$
$\includegraphics{https://example.org/spy.png}$
$\htmlStyle{position:fixed}{x}$ $\htmlId{composer}{x}$ $\htmlData{a=b}{x}$
$\text{<img src=x onerror="document.title='broken'">}$ $\color{red;background:url(https://example.org)}{x}$
$\rule{9999em}{9999em}$

```html
<img src=x onerror="document.title='broken'"><script>document.title='broken'</script>
```

```"><script>document.title='broken'</script>
x
```
"""


def test_formulas_and_code_run_nothing_and_load_nothing(page: Page, server: HttpServer) -> None:
    server.answer = say(HOSTILE_FORMULAS)
    page.goto(server.url)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    ask(page)
    turn = page.locator(".turn.model > .markdown")
    expect(turn).to_contain_text(r"\htmlStyle{position:fixed}{x}")
    assert page.title() == "Chat · moeserve"
    assert turn.locator("img, script, a, iframe, [href], [id], [data-a]").count() == 0
    assert all(url.startswith(server.url) for url in requests)
    boxes = turn.locator(".rule").all()
    assert all((box.bounding_box() or {"width": 0})["width"] < 1000 for box in boxes)
    expect(turn.locator("pre").first).to_contain_text("<script>document.title='broken'</script>")


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


@pytest.mark.slow
def test_code_is_copied_as_it_is(page: Page, server: HttpServer) -> None:
    server.answer = say("```python\nif a < b:\n    print('<b>')\n```")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    ask(page)
    page.locator("figure").get_by_role("button", name="Copy").click()
    expect(page.locator("figure").get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('<b>')"


TABLE = """| n | prime | note |
|---|---|---|
| 1,000,003 | yes | the smallest above a million, which is a note that a telephone breaks into several lines |
"""


@pytest.mark.slow
def test_words_in_a_narrow_table_stay_whole(page: Page, server: HttpServer) -> None:
    server.answer = say(TABLE)
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.url)
    ask(page)
    heights = page.locator(".turn.model td, .turn.model th").evaluate_all(
        "cells => cells.map((cell) => { const range = document.createRange(); range.selectNodeContents(cell);"
        " return range.getClientRects().length; })"
    )
    assert heights[:5] == [1] * 5, "one line each"
    assert heights[5] > 1
