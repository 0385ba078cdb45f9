"""The conversations that the chat page keeps: versions, the list, files, answers that go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import FilePayload, Locator, Page, expect

from tests.browser.conftest import ask
from tests.support.servers.http_harness import HttpServer, http_server, say, silence, tokens_of
from tests.support.servers.waiting import within


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """The real httpserver process with an engine that says what a test wants."""
    with http_server() as running:
        yield running


def prompt_of(server: HttpServer) -> str:
    """The last request's prompt."""
    return server.tokenizer.decode(tokens_of(server.requests[-1]))


def answers(page: Page) -> Locator:
    return page.locator(".turn.model > .markdown")


def chats(page: Page) -> Locator:
    return page.locator("#chat-list .open")


def act(page: Page, title: str, action: str) -> None:
    page.get_by_label(f"Actions for “{title}”").click()
    page.get_by_role("button", name=f"{action} “{title}”").click()


def answered(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_another_answer_stands_beside_the_first(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    server.answer = say("one")
    ask(page)
    server.answer = say("two")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".versions")).to_have_text("‹2/2›")
    expect(answers(page)).to_have_text("two")
    page.get_by_label("Previous version").click()
    expect(answers(page)).to_have_text("one")
    expect(page.get_by_label("Previous version")).to_be_disabled()
    page.reload()
    expect(answers(page)).to_have_text("one")
    server.answer = say("three")
    ask(page, "And?")
    assert "one" in prompt_of(server)
    page.get_by_label("Next version").click()
    expect(answers(page)).to_have_text(["two"])
    page.get_by_label("Previous version").click()
    expect(answers(page)).to_have_text(["one", "three"])


def test_a_choice_survives_a_reload_at_once(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    server.answer = say("one")
    ask(page)
    server.answer = say("two")
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_text("two")
    answered(page)
    # As a browser does with what it has not yet written when a page is loaded again: nothing is written.
    page.evaluate("() => { IDBObjectStore.prototype.put = function () {}; }")
    page.get_by_label("Previous version").click()
    page.reload()
    expect(answers(page)).to_have_text("one")


def test_an_edited_question_begins_a_branch(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    server.answer = say("one")
    ask(page, "First")
    ask(page, "Second")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").fill("Another")
    page.get_by_role("button", name="Save and ask").click()
    expect(page.locator(".words")).to_have_text(["Another"])
    answered(page)
    page.get_by_label("Previous version").click()
    expect(page.locator(".words")).to_have_text(["First", "Second"])


@pytest.mark.slow
def test_a_server_that_is_gone_takes_no_answer_with_it(page: Page) -> None:
    with http_server() as server:
        page.goto(server.url)
        server.answer = say("one")
        ask(page)
        server.process.kill()
        server.process.wait(30)
        for _ in range(2):  # the second takes the place of the first, which has said nothing
            page.get_by_role("button", name="Regenerate").click()
            expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
            expect(page.locator(".versions")).to_have_text("‹2/2›")
        page.get_by_label("Previous version").click()
        expect(answers(page)).to_have_text("one")


def test_a_stopped_answer_goes_on(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    server.answer = say("The quick brown", reason="length")
    ask(page)
    server.answer = say(" fox", " jumps")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_have_text("The quick brown fox jumps")
    answered(page)
    assert prompt_of(server).endswith("The quick brown")
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()


@pytest.mark.slow
def test_the_list_of_conversations(page: Page, server: HttpServer, tmp_path: Path) -> None:
    page.goto(server.url)
    server.answer = say("About **cats**")
    for question in ("Cats", "Dogs"):
        page.get_by_role("button", name="New chat").click(force=True)
        server.answer = say(f"About **{question}**")
        ask(page, question)
    expect(chats(page)).to_have_text(["Dogs", "Cats"])
    chats(page).last.click()
    expect(answers(page)).to_have_text("About Cats")
    act(page, "Cats", "Rename")
    page.get_by_label("Name of the conversation").fill("Felines")
    page.keyboard.press("Enter")
    expect(chats(page)).to_have_text(["Dogs", "Felines"])
    page.get_by_label("Search conversations").fill("about cats")
    expect(chats(page)).to_have_text(["FelinesAbout **Cats**"])  # the title, and what was found
    with page.expect_download() as download:
        act(page, "Felines", "Export")
    assert download.value.suggested_filename == "Felines.md"
    assert (
        download.value.path().read_text() == "# Felines\n\n## You\n\nCats\n\n## The model\n\nAbout **Cats**\n"
    )
    page.get_by_label("Search conversations").fill("")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    assert [one["messages"][0]["content"] for one in json.loads(download.value.path().read_text())] == [
        "Dogs",
        "Cats",
    ]
    act(page, "Felines", "Delete")
    expect(chats(page)).to_have_text(["Dogs"])
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(chats(page)).to_have_text(["Dogs", "Felines"])
    chats(page).last.click()
    expect(answers(page)).to_have_text("About Cats")


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page, server: HttpServer) -> None:
    """And that one can be asked meanwhile. A conversation that is deleted takes its answer with it."""
    page.goto(server.url)
    server.answer = silence
    before = len(server.requests)
    page.get_by_label("Your message").fill("First")
    page.keyboard.press("Enter")
    expect(chats(page)).to_have_text(["First …answering"])
    assert within(30, lambda: len(server.requests) > before), "the page says so before the request has come"
    page.get_by_role("button", name="New chat").click()
    server.answer = say("two")
    ask(page, "Second")
    expect(answers(page)).to_have_text("two")
    expect(chats(page)).to_have_text(["Second", "First …answering"])
    act(page, "First", "Rename")
    page.get_by_label("Name of the conversation").fill("Long")
    page.keyboard.press("Enter")
    asked = [one for one in server.requests if "First" in server.tokenizer.decode(tokens_of(one))]
    say("one")(server, asked[-1])
    expect(page.locator("#notice")).to_contain_text("“Long”: The answer is complete.")
    expect(chats(page)).to_have_text(["Second", "Long"])
    page.get_by_role("button", name="Show", exact=True).click()
    expect(answers(page)).to_have_text("one")
    answered(page)
    server.answer = silence
    page.get_by_label("Your message").fill("Third")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(chats(page)).to_have_text(["Long …answering", "Second"])
    chats(page).last.click()
    expect(chats(page).last).to_have_attribute("aria-current", "true")  # the other one has two answers
    expect(answers(page)).to_have_text("two")
    answered(page)
    chats(page).first.click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    chats(page).last.click()
    act(page, "Long", "Delete")
    expect(chats(page)).to_have_text(["Second"])
    assert within(10, lambda: len(server.aborted) == 1)


def test_the_list_keeps_what_is_pressed_and_typed_while_an_answer_ends(
    page: Page, server: HttpServer
) -> None:
    page.goto(server.url)
    server.answer = say("one")
    ask(page, "First")
    page.get_by_role("button", name="New chat").click()
    answer_later(page, server, "Second")
    act(page, "First", "Rename")
    page.get_by_label("Name of the conversation").fill("Half a na")
    end_answer(page, server)
    page.keyboard.type("me")
    page.keyboard.press("Enter")
    expect(chats(page)).to_have_text(["Second", "Half a name"])
    answer_later(page, server, "Third")
    chats(page).last.hover()
    page.mouse.down()
    end_answer(page, server)
    page.mouse.up()
    expect(answers(page)).to_have_text(["one"])


def answer_later(page: Page, server: HttpServer, question: str) -> None:
    before = len(server.requests)
    server.answer = silence
    page.get_by_label("Your message").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".answering")).to_have_count(1)
    assert within(30, lambda: len(server.requests) > before)


def end_answer(page: Page, server: HttpServer) -> None:
    say("two")(server, server.requests[-1])
    answered(page)
    expect(page.locator(".answering")).to_have_count(0)


@pytest.mark.slow
def test_two_tabs_keep_what_both_have_asked(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    server.answer = say("one")
    ask(page, "First")
    other = page.context.new_page()
    other.goto(server.url)
    other.locator("#chat-list .open").click()
    ask(other, "There")
    ask(page, "Here")
    other.reload()
    expect(other.locator(".words").last).to_have_text("There")
    other.get_by_label("Next version").click()
    expect(other.locator(".words").last).to_have_text("Here")


def test_text_files_go_with_a_question(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    server.answer = say("one")
    chooser = page.locator("#chooser")
    chooser.set_input_files(
        [
            FilePayload(name="a.md", mimeType="text/markdown", buffer=b"```\nfive\n```\n"),
            FilePayload(name="b.png", mimeType="image/png", buffer=b"\x89PNG\0\xff"),
            FilePayload(name="c.txt", mimeType="text/plain", buffer=b"no"),
        ]
    )
    expect(page.locator("#notice")).to_contain_text("b.png is a picture, and this model reads text only")
    page.get_by_label("Remove c.txt").click()
    expect(page.locator("#files li")).to_have_count(1)
    ask(page, "What is this?")
    assert "a.md:\n````\n```\nfive\n```\n````\n\nWhat is this?" in prompt_of(server)
    page.locator(".file summary").click()
    expect(page.locator(".file pre")).to_contain_text("five")
    expect(page.locator("#files")).to_be_hidden()


def test_text_files_of_windows_are_read(page: Page, server: HttpServer) -> None:
    """PowerShell writes UTF-16, Excel one byte a letter. They were refused."""
    page.goto(server.url)
    server.answer = say("one")
    chooser = page.locator("#chooser")
    little, big = "\ufeffseven".encode("utf-16-le"), "\ufeffeight".encode("utf-16-be")
    chooser.set_input_files(
        [
            FilePayload(name="a.txt", mimeType="text/plain", buffer=little),
            FilePayload(name="b.txt", mimeType="text/plain", buffer=big),
        ]
    )
    expect(page.locator("#files li")).to_have_count(2)
    expect(page.locator("#notice")).to_be_hidden()
    chooser.set_input_files(
        FilePayload(name="c.csv", mimeType="text/csv", buffer="“née”;3 €\r\n".encode("cp1252"))
    )
    expect(page.locator("#notice")).to_contain_text("c.csv is not UTF-8 and was read as Windows-1252")
    chooser.set_input_files(FilePayload(name="d.bin", mimeType="", buffer=bytes(range(1, 256))))
    expect(page.locator("#notice")).to_contain_text("d.bin is neither text nor a PDF nor a picture")
    expect(page.locator("#files li")).to_have_count(3)
    ask(page, "What is this?")
    prompt = prompt_of(server)
    for part in ("a.txt:\n```\nseven\n", "b.txt:\n```\neight\n", "“née”;3 €"):
        assert part in prompt
