"""The chat page in a real browser, on a real server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Request, expect

from tests.browser.conftest import KEY, Screenshot
from tests.e2e.completions import TEXT, is_empty
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

KEPT = """async () => {
  const { lastShown } = await import("./web/store.js");
  const { path } = await import("./web/conversation.js");
  return path(await lastShown());
}"""
LONG_TIME = 60_000  # milliseconds
ENDLESS = {"ignore_eos": True}
GREEDY = {"temperature": 0, "ignore_eos": True}
# `lengths` of the page: every length that an answer's text has had.
WATCH_LENGTHS = """() => {
  window.lengths = new Set();
  const watch = () => lengths.add(document.querySelector(".turn.model > .markdown")?.textContent.length ?? 0);
  const log = document.getElementById("log");
  new MutationObserver(watch).observe(log, { childList: true, subtree: true, characterData: true });
}"""


def open_chat(page: Page, server: Server, **settings: Any) -> list[dict[str, Any]]:
    """The page with these settings saved; `extra` is further fields. Returns the bodies that it will post."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            assert request.post_data_json is not None
            bodies.append(request.post_data_json)

    page.on("request", note)
    page.goto(server.base_url + "/")
    if settings:
        page.get_by_role("button", name="Settings").click()
        for name, value in settings.items():
            text = json.dumps(value) if name == "extra" else str(value)
            if name == "thinking":
                page.locator("[name=thinking]").select_option(text)
            else:
                page.locator(f"[name={name}]").fill(text)
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_role("dialog")).to_have_count(0)
    return bodies


def send(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def until_answered(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_be_hidden(timeout=LONG_TIME)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def answer(page: Page) -> Any:
    return page.locator(".turn.model").last.locator("> .markdown")


def kept(page: Page) -> list[dict[str, Any]]:
    """The conversation that is shown, as the page keeps it."""
    messages: list[dict[str, Any]] = page.evaluate(KEPT)
    return messages


def one_of(text: str) -> dict[str, Any]:
    """Makes the model answer with this very text."""
    return {"guided_choice": [text]}


def test_an_answer_is_shown_as_it_comes(page: Page, server: Server) -> None:
    bodies = open_chat(page, server, max_tokens=400, extra=GREEDY)
    page.evaluate(WATCH_LENGTHS)
    send(page, "Who jumps over the lazy dog?")
    until_answered(page)
    assert page.evaluate("lengths.size") > 3, "the text grew in several steps"
    (body,) = bodies
    whole = server.post(
        "/v1/chat/completions", {k: v for k, v in body.items() if k in {"messages", "max_tokens"}} | GREEDY
    )
    assert kept(page)[1]["content"] == whole["choices"][0]["message"]["content"]
    figures = page.locator(".figures").inner_text()
    assert "400 tokens" in figures
    assert "tok/s" in figures
    assert "first after" in figures
    assert f"prompt {whole['usage']['prompt_tokens']} tokens" in figures
    expect(page.locator("#model")).to_have_text("tiny-qwen3moe-q4_k_m")


def test_stopping_keeps_what_was_said_and_frees_the_server(page: Page, server: Server) -> None:
    open_chat(page, server, extra=ENDLESS | {"logprobs": True, "top_logprobs": 20})
    send(page, TEXT)
    expect(answer(page)).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    until_answered(page)
    assert within(30, lambda: is_empty(server))
    expect(page.locator(".figures")).to_contain_text("stopped")
    said = answer(page).inner_text()
    page.wait_for_timeout(200)
    assert answer(page).inner_text() == said
    assert kept(page)[1]["stats"]["tokens"] < 1900
    expect(page.get_by_label("Your message")).to_be_focused()


@pytest.mark.slow
def test_escape_stops_as_well(page: Page, server: Server) -> None:
    open_chat(page, server, extra=ENDLESS | {"logprobs": True, "top_logprobs": 20})
    send(page, TEXT)
    expect(answer(page)).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    assert within(30, lambda: is_empty(server))


def test_a_thought_is_folded_away(page: Page, server: Server, screenshot: Screenshot) -> None:
    """The model is made to open a thought (its budget closes it) and then to give this answer."""
    think = server.post("/tokenize", {"prompt": "<think>"})["tokens"][0]
    extra = {"logit_bias": {str(think): 100}, "repetition_penalty": 100, "temperature": 0} | one_of(PRIMES)
    bodies = open_chat(page, server, thinking="on", thinking_token_budget=30, extra=extra)
    send(page, "What is a prime number, and how do I find many of them?")
    until_answered(page)
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert bodies[0]["thinking_token_budget"] == 30
    thought = page.locator(".thought .markdown")
    summary = page.locator(".thought summary")
    expect(summary).to_have_text("Thought, 33 tokens")
    expect(thought).to_be_hidden()
    expect(answer(page).get_by_role("heading")).to_have_text("Prime numbers")
    screenshot(page, "chat")
    summary.focus()
    page.keyboard.press("Enter")
    expect(thought).to_be_visible()
    reasoning = kept(page)[1]["reasoning"]
    assert thought.inner_text().split() == reasoning.replace("<think>", "").split()
    assert reasoning.strip() not in answer(page).inner_text()


PRIMES = """# Prime numbers

A *prime* has exactly **two** divisors, `1` and itself. The [sieve](https://example.org/sieve) finds them all:

1. Take the numbers from 2 on.
2. Strike out the multiples of each that is left:
   - of 2
   - of 3

```python
def primes(limit: int) -> list[int]:
    is_prime = [False, False] + [True] * (limit - 2)
    for n in range(2, int(limit**0.5) + 1):
        is_prime[n * n :: n] = [False] * len(is_prime[n * n :: n])
    return [n for n in range(limit) if is_prime[n]]
```
"""


def test_turns_are_remembered_edited_and_asked_again(page: Page, server: Server) -> None:
    bodies = open_chat(page, server, max_tokens=8, system="Be brief.", extra=GREEDY)
    for text in ("First", "Second"):
        send(page, text)
        until_answered(page)
    first, _, second, _ = kept(page)
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies[1]["messages"][2]["content"] == kept(page)[1]["content"]
    page.get_by_role("button", name="Regenerate").last.click()
    until_answered(page)
    assert bodies[2] == bodies[1]
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").fill("Another")
    page.get_by_role("button", name="Save and ask").click()
    until_answered(page)
    assert [message["content"] for message in bodies[3]["messages"]] == ["Be brief.", "Another"]
    expect(page.locator(".turn")).to_have_count(2)
    assert (first["content"], second["content"]) == ("First", "Second")
    page.reload()
    expect(page.locator(".words")).to_have_text("Another")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()


@pytest.mark.slow
def test_settings_are_sent_as_they_are_and_empty_ones_not_at_all(page: Page, server: Server) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "max_tokens": 3, "seed": 7,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "thinking_token_budget": 20,
    }  # fmt: skip
    bodies = open_chat(page, server, **given, thinking="on", extra={"min_tokens": 2})
    send(page, "Hi")
    until_answered(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Clear all").click()
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("button", name="New chat").click()
    send(page, "Hi")
    expect(answer(page)).not_to_be_empty()
    page.keyboard.press("Escape")
    until_answered(page)
    own = {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_progress": True,
    }
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    assert bodies == [own | given | thinking | {"min_tokens": 2}, own]


@pytest.mark.slow
def test_further_fields_that_make_no_sense_are_not_saved(page: Page, server: Server) -> None:
    open_chat(page, server)
    page.get_by_role("button", name="Settings").click()
    field = page.locator("[name=extra]")
    for text, problem in (
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"stream": false}', "sets stream by itself"),
    ):
        field.fill(text)
        page.get_by_role("button", name="Save", exact=True).click()
        assert problem in field.evaluate("field => field.validationMessage")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(field).to_have_value("")


def test_an_error_is_shown_with_its_cause(page: Page, server: Server) -> None:
    open_chat(page, server, max_tokens=100_000)
    send(page, "Hi")
    until_answered(page)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("Error 400: messages: this model's maximum context length is 2048 tokens")


def test_a_missing_key_is_asked_for_and_kept_for_the_tab_only(page: Page, keyed_server: Server) -> None:
    open_chat(page, keyed_server)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog.get_by_role("alert")).to_have_text("This server wants a key.")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("The server does not take this key.")
    dialog.get_by_role("button", name="Cancel", exact=True).click()
    send(page, "Hi")
    until_answered(page)
    expect(page.locator(".turn").get_by_role("alert")).to_contain_text(
        "Error 401: a valid API key is required"
    )
    page.get_by_role("button", name="Enter an API key").click()
    dialog.get_by_label("Key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("tiny-qwen3moe-q4_k_m")
    expect(page.locator("#banner")).to_be_hidden()
    page.get_by_role("button", name="Regenerate").click()
    until_answered(page)
    expect(page.locator(".figures")).to_contain_text("tokens")
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    assert KEY in page.evaluate("JSON.stringify(sessionStorage)")


WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const line = document.querySelector(".waiting p")?.textContent;
    if (line && line !== window.seen.at(-1)) window.seen.push(line);
  }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""


def test_a_long_prompt_shows_how_far_it_is_read(page: Page, keyed_server: Server) -> None:
    page.add_init_script(f"sessionStorage['moeserve.api-key'] = '{KEY}'")
    open_chat(page, keyed_server, max_tokens=2)
    page.evaluate(WATCH)
    send(page, TEXT * 90)
    until_answered(page)
    first, *reading = page.evaluate("window.seen")
    assert first == "Waiting…"
    assert len(reading) >= 2
    prompt = kept(page)[1]["stats"]["prompt_tokens"]
    assert all(line.startswith("Reading the prompt: ") for line in reading)
    assert all(f" of {prompt:,} tokens" in line for line in reading)
    expect(page.locator(".waiting")).to_be_hidden()
