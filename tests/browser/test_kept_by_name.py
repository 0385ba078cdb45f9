"""System prompts and parameters that the chat page keeps by name, exchange of conversations, search, and speech."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, expect

from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import Screenshot, ask
from tests.support.servers.http_harness import HttpServer, http_server, say, tokens_of


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def prompt_of(server: HttpServer) -> str:
    return server.tokenizer.decode(tokens_of(server.requests[-1]))


def save_as(page: Page, what: str, name: str) -> None:
    page.get_by_role("button", name=f"Save as… ({what})").click()
    page.get_by_label(f"Name of the {what}").fill(name)
    page.keyboard.press("Enter")


def test_system_prompts_and_presets(page: Page, server: HttpServer, screenshot: Screenshot) -> None:
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    prompt, temperature = page.locator("[name=system]"), page.locator("[name=temperature]")
    for name, text in (("Pirate", "Talk like a pirate."), ("__proto__", "Be terse.")):
        prompt.fill(text)
        save_as(page, "system prompt", name)
    temperature.fill("0.25")
    save_as(page, "parameter preset", "Careful")
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    screenshot(page, "settings")
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(prompt).to_have_value("")
    page.get_by_label("Saved system prompts").select_option("Pirate")
    expect(prompt).to_have_value("Talk like a pirate.")
    page.get_by_label("Saved parameter presets").select_option("Careful")
    expect(temperature).to_have_value("0.25")
    expect(prompt).to_have_value("Talk like a pirate.")
    page.get_by_role("button", name="Save", exact=True).click()
    server.answer = say("Arr")
    ask(page)
    assert "Talk like a pirate." in prompt_of(server)
    assert server.requests[-1].sampling.temperature == 0.25
    page.get_by_role("button", name="Settings").click()
    prompts = page.get_by_label("Saved system prompts")
    expect(prompts.locator("option")).to_have_text(["Choose…", "__proto__", "Pirate"])
    prompts.select_option("__proto__")
    expect(prompt).to_have_value("Be terse.")
    page.get_by_role("button", name="Delete (system prompt)").click()
    expect(prompts.locator("option")).to_have_text(["Choose…", "Pirate"])


def conversation(**changes: Any) -> dict[str, Any]:
    question = {"id": "a1", "parent": "", "at": 1, "role": "user", "content": "Why?"}
    answer = {
        "id": "a2",
        "parent": "a1",
        "at": 2,
        "role": "assistant",
        "content": "Because.",
        "state": "done",
    }
    whole = {"id": "c1", "title": "Taken over", "updated": 3, "messages": [question, answer], "chosen": {}}
    return whole | changes


def take(page: Page, content: str) -> None:
    file = FilePayload(name="chats.json", mimeType="application/json", buffer=content.encode())
    page.locator("#import-chooser").set_input_files(file)


def test_all_conversations_leave_and_come_back(page: Page, server: HttpServer) -> None:
    server.answer = say("two")
    page.goto(server.url)
    ask(page, "One")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".versions")).to_have_text("‹2/2›")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    exported = download.value.path().read_text()
    page.get_by_label("Actions for “One”").click()
    page.get_by_role("button", name="Delete “One”").click()
    expect(page.locator("#chat-list li")).to_have_count(0)
    take(page, exported)
    expect(page.locator("#notice")).to_contain_text("Imported 1 conversation.")
    page.locator("#chat-list .open").click()
    expect(page.locator(".versions")).to_have_text("‹2/2›")
    expect(page.locator(".figures")).to_contain_text("token")
    take(page, exported)  # again: nothing is there twice
    expect(page.locator("#chat-list li")).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    assert json.loads(download.value.path().read_text()) == json.loads(exported)


QUESTION, ANSWER = conversation()["messages"]
NOT_TAKEN = {
    "it is not JSON": "{",
    "the file: a list is expected": json.dumps({"chats": []}),
    "conversation 1 is not of the form": json.dumps([None]),
    "conversation 2 has an id": json.dumps([conversation(), conversation(id="__proto__")]),
    "has no role": json.dumps([conversation(messages=[QUESTION | {"role": "system"}])]),
    "two messages with the same id": json.dumps([conversation(messages=[QUESTION, QUESTION])]),
    "without the one that it answers": json.dumps([conversation(messages=[ANSWER | {"parent": "a2"}])]),
    "message 1 of conversation 1: a text": json.dumps([conversation(messages=[QUESTION | {"content": {}}])]),
    "is no PNG, JPEG, WebP, GIF or video": json.dumps(
        [conversation(pictures={"d1": "data:image/svg+xml;base64,PHN2Zz4="})]
    ),
    "title of conversation 1: a text of at most 200": json.dumps([conversation(title="x" * 201)]),
    "20001 entries, of which there may be 20000": json.dumps([conversation(messages=[0] * 20_001)]),
}


def test_a_file_that_is_not_an_export_is_refused_whole(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    for cause, content in NOT_TAKEN.items():
        take(page, content)
        expect(page.locator("#notice")).to_contain_text(cause)
        expect(page.locator("#notice")).to_contain_text("chats.json was not imported")
    expect(page.locator("#chat-list li")).to_have_count(0)


def test_what_an_import_does_not_know_is_left_out(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    answer = ANSWER | {"stats": {"tokens": 3}, "onclick": "x", "state": "answering"}
    take(page, json.dumps([conversation(messages=[QUESTION, answer], colour="red")]))
    page.get_by_role("button", name="Taken over", exact=True).click()
    expect(page.locator(".turn.model > .markdown")).to_have_text("Because.")
    expect(page.locator(".figures")).to_contain_text("stopped")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    (found,) = json.loads(download.value.path().read_text())
    assert "colour" not in found
    assert "onclick" not in found["messages"][1]


def test_a_search_shows_where_the_word_is(page: Page, server: HttpServer, screenshot: Screenshot) -> None:
    page.goto(server.url)
    long = ANSWER | {"content": "It is a matter of <b>light</b> that Rayleigh scattering explains."}
    take(page, json.dumps([conversation(messages=[QUESTION, long]), conversation(id="c2", title="Other")]))
    page.get_by_label("Search conversations").fill("rayleigh")
    expect(page.locator("#chat-list li")).to_have_count(1)
    expect(page.locator(".excerpt mark")).to_have_text("Rayleigh")
    expect(page.locator(".excerpt")).to_contain_text("</b> that Rayleigh scattering explains.")
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    screenshot(page, "search")


# Chromium without a screen has no recogniser: this stands in its place, and says what a test tells it to.
RECOGNISER = """globalThis.SpeechRecognition = class {
  static available() { return Promise.resolve("unavailable"); }
  start() { globalThis.recogniser = this; }
  stop() { this.onend(); }
  hear(...texts) { this.onresult({ results: texts.map((transcript) => [{ transcript }]) }); }
};"""


def test_speech_is_written_down(page: Page, server: HttpServer, screenshot: Screenshot) -> None:
    page.add_init_script(RECOGNISER)
    page.goto(server.url)
    words, button = page.get_by_label("Your message"), page.get_by_role("button", name="Dictate")
    words.fill("Please:")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#notice")).to_contain_text("Your browser may send what you say to its maker")
    page.wait_for_function("() => globalThis.recogniser")
    page.evaluate("recogniser.hear('what is')")
    expect(words).to_have_value("Please: what is")
    page.evaluate("recogniser.hear('what is ', 'a prime?')")
    expect(words).to_have_value("Please: what is a prime?")
    screenshot(page, "speech")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    button.click()
    page.evaluate("() => { recogniser.onerror({ error: 'not-allowed' }); recogniser.onend(); }")
    expect(page.locator("#notice")).to_contain_text("does not let this page use the microphone")


def test_where_nothing_recognises_speech_there_is_no_button(page: Page, server: HttpServer) -> None:
    page.add_init_script("delete globalThis.SpeechRecognition; delete globalThis.webkitSpeechRecognition;")
    page.goto(server.url)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("button", name="Dictate")).to_be_hidden()
