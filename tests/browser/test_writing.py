"""What helps to write, to find and to hear: drafts, messages that wait, long pastes, links with a question, keys,
pinned conversations, answers read aloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import Screenshot, ask
from tests.support.nightly import nightly_after
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say, silence, tokens_of
from tests.support.servers.waiting import within

PASTE = """text => {
  const clipboardData = new DataTransfer();
  clipboardData.setData("text/plain", text);
  const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
  return document.getElementById("words").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=1 << 14) as running:
        yield running


def prompt_of(server: HttpServer) -> str:
    return server.tokenizer.decode(tokens_of(server.requests[-1]))


def ready(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model")).to_have_text(NAME)


def test_what_is_not_sent_stays_with_its_conversation(page: Page, server: HttpServer) -> None:
    server.answer = say("one")
    ready(page, server.url)
    words = page.get_by_label("Your message")
    ask(page, "First")
    words.fill("half a thought")
    page.get_by_role("button", name="New chat").click()
    expect(words).to_have_value("")
    words.fill("a new one")
    page.reload()
    expect(words).to_have_value("a new one")
    page.locator("#chat-list .open").click()
    expect(words).to_have_value("half a thought")
    page.get_by_role("button", name="New chat").click()
    expect(words).to_have_value("a new one")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.reload()
    expect(page.locator(".words")).to_have_text("a new one")
    expect(words).to_have_value("")


def test_a_long_paste_becomes_a_file(page: Page, server: HttpServer) -> None:
    server.answer = say("one")
    ready(page, server.url)
    words = page.get_by_label("Your message")
    assert page.evaluate(PASTE, "short"), "the browser's own pasting is left to it"
    long = "line of a log\n" * 400
    assert not page.evaluate(PASTE, long)
    assert not page.evaluate(PASTE, long.upper())
    expect(page.locator("#files li")).to_have_text(
        [
            "pasted.txt, 5,600 characters✕",
            "pasted 2.txt, 5,600 characters✕",
        ]
    )
    words.fill("ab")
    words.press("ArrowLeft")
    page.get_by_role("button", name="Insert it instead").click()
    expect(words).to_have_value(f"a{long.upper()}b")
    words.fill("What does it say?")
    page.keyboard.press("Enter")
    expect(page.locator("details.file summary")).to_have_text("pasted.txt, 5,600 characters")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert f"pasted.txt:\n```\n{long}```\n\nWhat does it say?" in prompt_of(server)


@pytest.mark.parametrize("mark", nightly_after(1, ["?", "#"]))
def test_a_link_brings_a_question_for_the_user_to_send(page: Page, server: HttpServer, mark: str) -> None:
    """Also where the tab has shown a conversation before."""
    server.answer = say("one")
    ready(page, server.url)
    ask(page, "First")
    asked = len(server.requests)
    page.goto("about:blank")
    ready(page, f"{server.url}/{mark}q={quote('Why <b> & not &lt;?')}")
    expect(page.get_by_label("Your message")).to_have_value("Why <b> & not &lt;?")
    expect(page.locator(".words")).to_have_count(0)
    assert page.url == f"{server.url}/"
    assert len(server.requests) == asked, "nothing was sent"


def test_keys(page: Page, server: HttpServer) -> None:
    server.answer = say("one")
    ready(page, server.url)
    ask(page, "First")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".words")).to_have_count(0)
    expect(page.get_by_label("Your message")).to_be_focused()
    expect(page.locator("#chats")).to_be_visible()
    page.keyboard.press("Control+b")
    expect(page.locator("#chats")).to_be_hidden()
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.get_by_role("button", name="Settings").click()
    page.keyboard.press("Control+b")  # no keys behind a dialog
    expect(page.locator("#chats")).to_be_visible()


@pytest.mark.parametrize("width", nightly_after(1, [360, 768, 1280]))
def test_pinned_conversations_stand_first(
    page: Page, server: HttpServer, width: int, screenshot: Screenshot
) -> None:
    server.answer = say("one")
    page.set_viewport_size({"width": width, "height": 900})
    ready(page, server.url)
    for title in ("First", "Second"):
        ask(page, title)
        page.get_by_role("button", name="New").click()
    if page.locator("#chats").is_hidden():
        page.get_by_role("button", name="Chats").click()
    titles = page.locator("#chat-list .open")
    expect(titles).to_have_text(["Second", "First"])
    page.get_by_label("Actions for “First”").click()
    page.get_by_role("button", name="Pin “First”", exact=True).click()
    expect(titles).to_have_text(["Pinned: First", "Second"])
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    screenshot(page, f"pinned-{width}")
    page.reload()
    if page.locator("#chats").is_hidden():
        page.get_by_role("button", name="Chats").click()
    expect(titles).to_have_text(["Pinned: First", "Second"])
    page.get_by_label("Actions for “First”").click()
    page.get_by_role("button", name="Unpin “First”", exact=True).click()
    expect(titles).to_have_text(["Second", "First"])


def test_reasoning_effort(page: Page, server: HttpServer) -> None:
    server.answer = say("one")
    ready(page, server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Reasoning effort").select_option("low")
    page.get_by_role("button", name="Save", exact=True).click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    assert (sent.value.post_data_json or {})["reasoning_effort"] == "low"


def test_a_message_waits_for_the_end_of_an_answer(page: Page, server: HttpServer) -> None:
    """With Enter while an answer comes. It stays in the field, where it can be changed, and is not sent if the answer
    is stopped."""
    ready(page, server.url)
    words, waits = page.get_by_label("Your message"), page.get_by_text("Goes when the answer is complete.")

    def write(text: str) -> None:
        words.fill(text)
        page.keyboard.press("Enter")

    def answer_comes() -> None:
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        assert within(30, lambda: len(server.requests) > before)

    before, server.answer = len(server.requests), silence
    write("First")
    answer_comes()
    write("Second")
    expect(waits).to_be_visible()
    page.get_by_role("button", name="Do not send").click()
    expect(waits).to_be_hidden()
    write("Second, changed")
    expect(waits).to_be_visible()
    expect(page.locator(".words")).to_have_text(["First"])
    before = len(server.requests)
    say("one")(server, server.requests[-1])
    expect(page.locator(".words")).to_have_text(["First", "Second, changed"])
    expect(words).to_have_value("")
    expect(waits).to_be_hidden()
    answer_comes()
    write("Third")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(words).to_have_value("Third")
    expect(waits).to_be_hidden()
    expect(page.locator(".words")).to_have_count(2)


VOICES = """voices => {
  window.said = [];
  const speech = {
    getVoices: () => voices,
    speak: (part) => window.said.push([part.text, part.voice?.name ?? null, part]),
    cancel: () => window.said.push("cancel"),
  };
  Object.defineProperty(window, "speechSynthesis", { value: speech });
  window.SpeechSynthesisUtterance = function (text) { this.text = text; };
}"""
NEAR = {"name": "near", "lang": "en-GB", "localService": True}
FAR = {"name": "far", "lang": "en-US", "localService": False}


def test_answers_are_read_aloud(page: Page, server: HttpServer) -> None:
    said = "window.said.map(one => Array.isArray(one) ? one.slice(0, 2) : one)"
    page.add_init_script(f"({VOICES})({json.dumps([FAR, NEAR])})")
    ready(page, server.url)
    server.answer = say("One **two**.\n\n```sh\nls\n```\n\nThree.")
    ask(page, "First")
    button = page.get_by_role("button", name="Read aloud")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    parts = [["One two.", "near"], ["(Code.)", "near"], ["Three.", "near"]]
    assert page.evaluate(said) == ["cancel", *parts]
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    button.click()
    page.evaluate("window.said.at(-1)[2].onend()")
    expect(button).to_have_attribute("aria-pressed", "false")
    page.evaluate("speechSynthesis.getVoices = () => []")
    button.click()
    expect(page.locator("#notice")).to_contain_text("no voice")
    page.evaluate(f"speechSynthesis.getVoices = () => [{json.dumps(FAR)}]")
    button.click()
    expect(page.locator("#notice")).to_contain_text("may send the answer to its maker")
