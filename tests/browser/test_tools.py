"""Tools of MCP servers on the chat page: chosen, asked about before each call, and told to the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.axe import AXE, FINDINGS
from tests.browser.conftest import Screenshot
from tests.support.servers.http_harness import Answer, HttpServer, http_server, say, tokens_of
from tests.support.servers.mcp_server import McpServer, running_mcp_server

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'


@pytest.fixture
def tools() -> Iterator[McpServer]:
    with running_mcp_server() as running:
        yield running


@pytest.fixture
def server(tools: McpServer) -> Iterator[HttpServer]:
    with http_server(
        mcp_servers=(f"demo={tools.url}", "gone=http://127.0.0.1:9/mcp"), context=4096
    ) as running:
        yield running


def in_turn(*answers: Answer) -> Answer:
    """An engine that answers the first request with the first, and so on."""
    left = list(answers)
    return lambda server, request: left.pop(0)(server, request)


def prompt_of(server: HttpServer) -> str:
    return server.tokenizer.decode(tokens_of(server.requests[-1]))


def use(page: Page, server: HttpServer, name: str) -> None:
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label(name).check()


def ask(page: Page, text: str = "What is 2 + 40?") -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def test_a_call_is_made_when_the_user_allows_it(
    page: Page, server: HttpServer, tools: McpServer, screenshot: Screenshot
) -> None:
    use(page, server, "demo")
    expect(page.locator("#tool-servers")).to_contain_text("demo 2 tools")
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    page.keyboard.press("Escape")
    server.answer = in_turn(say("Let me see. ", CALL), say("It is 42."))
    ask(page)
    call = page.get_by_role("region", name="Call of a tool")
    expect(call).to_contain_text("add, of the MCP server demo")
    expect(call).to_contain_text('"b": 40')
    assert "Adds two numbers." in prompt_of(server), "the model was offered it"
    assert tools.calls == [], "nothing is called before the user's word"
    page.evaluate(AXE)
    assert page.evaluate(FINDINGS) == []
    screenshot(page, "tools")
    call.get_by_role("button", name="Allow this call").click()
    expect(page.get_by_text("It is 42.")).to_be_visible()
    assert tools.calls == [("add", {"a": 2, "b": 40})]
    assert "<tool_response>\n42\n</tool_response>" in prompt_of(server)
    call.get_by_text("Result").click()
    expect(call.get_by_text("42", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_text("It is 42.")).to_be_visible()
    expect(call.get_by_role("button", name="Allow this call")).to_be_hidden()
    server.answer = say("Yes.")
    ask(page, "Sure?")
    expect(page.get_by_text("Yes.")).to_be_visible()
    assert "<tool_response>\n42\n</tool_response>" in prompt_of(server), "it stays in the conversation"
    assert len(tools.calls) == 1


def test_a_call_that_is_refused_reaches_no_server(page: Page, server: HttpServer, tools: McpServer) -> None:
    use(page, server, "demo")
    expect(page.locator("#tool-servers")).to_contain_text("demo 2 tools")
    page.keyboard.press("Escape")
    server.answer = in_turn(say(CALL, "\n", CALL.replace("40", "50")), say("Then not."))
    ask(page)
    calls = page.get_by_role("region", name="Call of a tool")
    expect(calls).to_have_count(2)
    page.reload()  # the question waits
    calls.nth(0).get_by_role("button", name="Refuse").click()
    expect(calls.nth(0)).to_contain_text("Refused")
    assert len(server.requests) == 1, "each call is asked about"
    calls.nth(1).get_by_role("button", name="Allow this call").click()
    expect(page.get_by_text("Then not.")).to_be_visible()
    assert tools.calls == [("add", {"a": 2, "b": 50})]
    assert "The user did not allow this call." in prompt_of(server)
    assert "<tool_response>\n52\n</tool_response>" in prompt_of(server)


def test_a_question_instead_of_a_word_about_a_call(page: Page, server: HttpServer, tools: McpServer) -> None:
    use(page, server, "demo")
    expect(page.locator("#tool-servers")).to_contain_text("demo 2 tools")
    page.keyboard.press("Escape")
    server.answer = in_turn(say(CALL), say("Never mind."))
    ask(page)
    expect(page.get_by_role("button", name="Allow this call")).to_be_visible()
    ask(page, "Leave it")
    expect(page.get_by_text("Never mind.")).to_be_visible()
    assert "The user did not allow this call." in prompt_of(server)
    assert tools.calls == []


def test_a_server_that_is_gone_and_tools_that_are_not_used(
    page: Page, server: HttpServer, tools: McpServer
) -> None:
    use(page, server, "gone")
    expect(page.locator("#tool-servers")).to_contain_text("'gone' cannot be reached")
    page.keyboard.press("Escape")
    server.answer = say("Hello.")
    ask(page)
    expect(page.get_by_text("Hello.")).to_be_visible()
    assert "add" not in prompt_of(server)
    assert tools.headers == [], "a server that the user has not chosen is not asked"


def test_no_list_where_the_operator_names_none(page: Page) -> None:
    with http_server() as running:
        page.goto(running.url)
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("[name=system]")).to_be_visible()
        expect(page.locator("#tools")).to_be_hidden()
