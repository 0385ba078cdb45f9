"""Titles of chats by the model, and the chat page as an app of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from moeserve.messages.schema import GenerateRequest
from tests.browser.conftest import ask
from tests.support.servers.http_harness import HttpServer, http_server, say, tokens_of
from tests.support.servers.waiting import within

QUESTION = "Write a title for this conversation"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def prompts_of(server: HttpServer) -> list[str]:
    return [server.tokenizer.decode(tokens_of(request), skip_special=False) for request in server.requests]


def titles_by_the_model(page: Page, server: HttpServer, title: str) -> None:
    """Sets them, and what the model says when it is asked for one."""

    def answer(one: HttpServer, request: GenerateRequest) -> None:
        asked = QUESTION in one.tokenizer.decode(tokens_of(request))
        say(title if asked else "Grass is green.")(one, request)

    server.answer = answer
    server.requests.clear()
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Titles of chats").select_option("by the model")
    page.get_by_role("button", name="Save", exact=True).click()


def listed(page: Page) -> list[str]:
    if page.locator("#chats").is_hidden():
        page.get_by_role("button", name="Chats").click()
    return page.locator("#chat-list .open").all_inner_texts()


def test_the_model_writes_a_title_once(page: Page, server: HttpServer) -> None:
    titles_by_the_model(page, server, '**Title: "The colour of grass."**\nBecause')
    ask(page, "What colour is grass?")
    assert within(30, lambda: listed(page) == ["The colour of grass"])
    ask(page, "And the sky?")
    assert within(30, lambda: len(server.requests) == 3)
    first, title, second = prompts_of(server)
    assert title.startswith(first.removesuffix("\n").rpartition("<|im_start|>")[0]), "in the prefix cache"
    assert "Grass is green." in title
    assert QUESTION not in second
    page.reload()
    assert within(30, lambda: listed(page) == ["The colour of grass"])


def test_a_title_that_does_not_come_leaves_the_first_words(page: Page, server: HttpServer) -> None:
    titles_by_the_model(page, server, "  ** **\n")
    ask(page, "What colour is grass?")
    assert within(30, lambda: len(server.requests) == 2)
    assert listed(page) == ["What colour is grass?"]


def test_titles_are_the_first_words_unless_asked_for(page: Page, server: HttpServer) -> None:
    server.answer = say("Green.")
    server.requests.clear()
    page.goto(server.url)
    ask(page, "What colour is grass?")
    ask(page, "And the sky?")
    assert len(server.requests) == 2
    assert listed(page) == ["What colour is grass?"]


def test_a_browser_can_install_the_page(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    browser = page.context.new_cdp_session(page)
    manifest = browser.send("Page.getAppManifest")
    assert manifest["errors"] == []
    assert manifest["manifest"]["startUrl"] == server.url + "/"
    problems = [
        one["errorId"] for one in browser.send("Page.getInstallabilityErrors")["installabilityErrors"]
    ]
    assert [one for one in problems if one != "in-incognito"] == [], "the test's profile is a private one"
