"""A chat with httpserver, the test in place of the engine. Complaints about other chats in terminals name their
report."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path

import pytest

from moeserve.cli.background_server import wait_until_ready
from moeserve.cli.run.answer import AnswerView
from moeserve.cli.run.client import ChatClient
from moeserve.cli.run.events import End, Piece
from moeserve.cli.run.history import FILE, History
from moeserve.cli.run.slash_commands import COMMANDS
from moeserve.cli.running_server import ServedModel
from moeserve.messages.schema import GenerateRequest, TextItem, TextOut
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.raw_server import piece, raw_server, stream_of
from tests.support.clients.run_chats import REASONED, Chat, interrupt_soon
from tests.support.servers.http_harness import NAME, Answer, HttpServer, http_server, say
from tests.support.servers.waiting import within

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def begin(*pieces: str) -> Answer:
    """An engine that says this, and has not ended."""

    def answer(server: HttpServer, request: GenerateRequest) -> None:
        for text in pieces:
            server.send(TextOut([TextItem(request.id, text, server.tokenizer.encode(text or "x")[:1])]))

    return answer


def interrupted_question(server: HttpServer, request: GenerateRequest) -> None:
    """Ctrl-C before the first token."""
    interrupt_soon()


def test_a_conversation_goes_on(server: HttpServer, chat: Chat) -> None:
    server.answer = say("The first", " answer.")
    shown = chat.type("one?", "two?")
    assert shown.count("The first answer.\n") == 2
    assert re.search("one\\?.*The first answer\\..*two\\?", prompt_of(server), re.DOTALL)
    assert "/help lists the commands, Ctrl-D leaves" in shown


def test_nothing_is_added_to_an_answer(server: HttpServer, chat: Chat) -> None:
    """ollama/ollama#1275: its line breaks for the terminal's width fell within Chinese words."""
    text = "日本語の文章" * 60
    server.answer = say(text)
    assert f"\n{text}\n" in chat.type("?")


def test_an_answer_is_made_safe(server: HttpServer, chat: Chat) -> None:
    """Also where the pieces cut a sequence. What the model is shown of its answer is what it wrote."""
    server.answer = say("a\x1b", "]52;c;cm0g", "LXJm\x1b", "\\b\x1b[", "2J\x9b31mc\u202e\r", "d")
    shown = chat.type("?", "?")
    assert "\nabcd\n" in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert "\x1b]52" in chat.session.conversation.messages[1]["content"]


def test_reasoning_is_folded_under_a_line(server: HttpServer, chat: Chat) -> None:
    """ollama/ollama#8528: all of it was shown, always."""
    server.answer = say(*REASONED)
    shown = chat.type("?", "/reasoning")
    assert "reasoned for 0 s; /reasoning shows it\nHere you are.\n" in shown
    assert shown.count("Let me see.") == 1
    shown = chat.type("/reasoning show", "?", "/reasoning hide", "?")
    assert "reasoning:\nLet me see.\n\nHere you are.\n" in shown.replace("reasoning:\n\n", "reasoning:\n")
    assert shown.count("Let me see.") == 1
    assert "reasoned for" not in shown


def test_what_is_reasoned_is_made_safe(server: HttpServer, chat: Chat) -> None:
    server.answer = say("<think>", "a\x1b[2", "Jb", "</think>", "c")
    shown = chat.type("/reasoning show", "?", "/reasoning")
    assert shown.count("ab") == 2
    assert "\x1b" not in shown


def test_ctrl_c_stops_an_answer_and_keeps_it(server: HttpServer, chat: Chat) -> None:
    """charmbracelet/crush#831: the server went on. mozilla-ai/llamafile#1008: an HTTP error was shown."""
    server.answer, chat.interrupt_at = begin("Once", " upon"), " upon"
    shown = chat.type("a story")
    assert "Once upon\n(stopped)\n" in shown
    assert "error" not in shown
    assert within(10, lambda: len(server.aborted) == 1)
    server.answer = say("Again.")
    chat.type("go on")
    assert re.search("a story.*Once upon.*go on", prompt_of(server), re.DOTALL)


def test_ctrl_c_stops_the_reading_of_a_prompt(server: HttpServer, chat: Chat) -> None:
    """ollama/ollama#2052: it waited until the prompt had been read. The question is not asked again."""
    server.answer = interrupted_question
    assert "(stopped)" in chat.type("a long one")
    assert within(10, lambda: len(server.aborted) == 1)
    assert chat.session.conversation.messages == []


def test_a_second_ctrl_c_does_no_harm(
    server: HttpServer, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while what the first has stopped is put away."""
    end, handler = AnswerView.end, signal.getsignal(signal.SIGINT)

    def interrupted_end(view: AnswerView) -> None:
        signal.raise_signal(signal.SIGINT)
        end(view)

    monkeypatch.setattr(AnswerView, "end", interrupted_end)
    server.answer, chat.interrupt_at = begin("Once"), "Once"
    assert "Once\n(stopped)\n" in chat.type("a story")
    assert chat.session.conversation.messages[1]["content"] == "Once"
    assert signal.getsignal(signal.SIGINT) is handler


def test_no_colour_is_left_behind(server: HttpServer) -> None:
    """ggml-org/llama.cpp#283: Ctrl-C left the terminal coloured."""
    chat = Chat(server.url, terminal=True, colours=True, reasoning_view="show")
    server.answer, chat.interrupt_at = begin("<think>", "\nLet me"), "Let me"
    shown = chat.type("?")
    assert "\x1b[2mLet me\x1b[0m" in shown
    assert re.findall("\x1b\\[[0-9]+m", shown)[-1] == "\x1b[0m"
    server.begin_anew()


@pytest.mark.parametrize("terminal", [True, False])
def test_colours_are_for_terminals_that_want_them(server: HttpServer, terminal: bool) -> None:
    server.answer = say(*REASONED)
    assert "\x1b[2m" not in Chat(server.url, terminal=terminal, reasoning_view="show").type("?")
    colours = Chat(server.url, terminal=terminal, colours=True, reasoning_view="show").type("?")
    assert ("\x1b[2m" in colours) == terminal


def test_ctrl_c_at_the_prompt_leaves_at_the_second(server: HttpServer, chat: Chat) -> None:
    server.answer = say("Yes.")
    shown = chat.type(KeyboardInterrupt, "?", KeyboardInterrupt, KeyboardInterrupt, "not asked")
    assert shown.count("Ctrl-C again, Ctrl-D or /bye leaves") == 2
    assert len(server.requests) == 1


def test_an_error_is_a_line_and_the_chat_goes_on(server: HttpServer, chat: Chat) -> None:
    server.answer = say("Yes.")
    shown = chat.type("long " * 600, "short?")
    assert re.search("error: the server says: .*512.*; /clear begins a new conversation\n", shown)
    assert "Yes.\n" in shown
    assert len(chat.session.conversation.messages) == 2


def test_an_answer_that_breaks_off_is_kept() -> None:
    hostile = '{"error": {"message": "lost\\u001b[2J\\nsecond line"}}'
    with raw_server([stream_of(piece("half"))], [stream_of(hostile)]) as (url, _):
        chat = Chat(url)
        shown = chat.type("one", "two", "three")
    assert f"half\nerror: the connection to {url} was lost; ask again" in shown
    assert "error: the server says: lost second line\n" in shown
    assert [one["content"] for one in chat.session.conversation.messages] == ["one", "half"]


def test_a_server_that_loads_its_model_is_waited_for() -> None:
    """The question is asked again by itself."""
    with http_server() as server:
        server.start_again()
        chat = Chat(server.url, wait_until_ready=lambda: wait_until_ready(server.url, None))
        server.answer = say("At last.")
        threading.Timer(1.0, server.engine_ready).start()
        assert "At last.\n" in chat.type("?")


def test_figures(server: HttpServer) -> None:
    server.answer = say("Yes", ".")
    shown = Chat(server.url, verbose=True).type("?", "/verbose", "?")
    assert (
        len(
            re.findall(
                r"^prompt: \d+ tokens, 0 of them cached, [\d.]+ tokens/s; answer: 2 tokens", shown, re.M
            )
        )
        == 1
    )


def test_an_answer_that_was_cut_says_so(server: HttpServer, chat: Chat) -> None:
    server.answer = say("Once", reason="length")
    assert "Once\n(the answer was cut: max_tokens, or the end of the context)\n" in chat.type("?")
    server.answer = say("<think>", "hm", "</think>")
    assert "(the answer has no text)" in chat.type("?")


def test_the_history_has_what_was_typed(server: HttpServer, tmp_path: Path) -> None:
    path = tmp_path / FILE
    Chat(server.url, history=History(path)).type("one?", '"""two', 'lines"""', "/show", "", "/bye")
    assert History(path).entries() == ["one?", "two\nlines", "/show"]


# ---------------------------------------------------------------- commands


def test_settings_and_the_system_prompt_are_sent(server: HttpServer, chat: Chat) -> None:
    chat.type("/system You are a cat.", "/set temperature 0.5", "/set seed 7", "/set max_tokens 3", "?")
    sampling = server.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 3)
    assert "You are a cat." in prompt_of(server)
    shown = chat.type("/set temperature default", "/system", "/show", "/set")
    assert chat.session.conversation.settings == {"seed": 7, "max_tokens": 3}
    assert re.search("^  system prompt +none$", shown, re.M)
    assert "  seed 7  (0 or more)" in shown
    chat.type("?")
    assert server.requests[-1].sampling.temperature != 0.5
    assert "You are a cat." not in prompt_of(server)


def test_clear_begins_anew(server: HttpServer, chat: Chat) -> None:
    server.answer = say("Yes.")
    chat.type("first", "/clear", "second")
    assert "first" not in prompt_of(server)


def test_what_is_no_command(server: HttpServer, chat: Chat) -> None:
    """google-gemini/gemini-cli#17003: a path at the beginning was an unknown command."""
    server.answer = say("A path.")
    shown = chat.type(
        "/home/mia/notes.txt is missing", "/hlep", "/xyz", "/set", "/set seed", "/image", "/save"
    )
    assert len(server.requests) == 1
    assert "error: there is no command /hlep; did you mean /help?\n" in shown
    assert "error: there is no command /xyz; /help lists them\n" in shown
    assert "error: /set seed needs a value, or default\n" in shown
    assert shown.count("error: ") == 5


def test_help_names_every_command(chat: Chat) -> None:
    shown = chat.type("/help")
    assert all(f"\n  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("command", ["/bye", "/exit", "/quit"])
def test_leaving(server: HttpServer, chat: Chat, command: str) -> None:
    chat.type(command, "not asked")
    assert server.requests == []


def test_save_and_load(server: HttpServer, chat: Chat, tmp_path: Path) -> None:
    server.answer = say("A red ball.")
    path = tmp_path / "saved.json"
    chat.type("What?", "/system Be brief.", f"/save {path}")
    assert path.stat().st_mode & 0o777 == 0o600
    other = Chat(server.url)
    assert f"2 messages of {path}" in other.type(f"/load {path}", "And now?")
    assert re.search("Be brief.*What\\?.*A red ball.*And now", prompt_of(server), re.DOTALL)
    assert "already exists; choose another name" in other.type(f"/save {path}")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "moeserve-conversation"}', '{"format": "moeserve-conversation", "version": 1, '
    '"system": "", "messages": [{"role": "tool", "content": "x"}]}']
)  # fmt: skip
def test_what_is_no_saved_conversation(server: HttpServer, chat: Chat, tmp_path: Path, content: str) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    server.answer = say("Yes.")
    shown = chat.type("kept?", f"/load {path}", f"/load {tmp_path}/none")
    assert f"error: {path} is not a conversation that /save wrote\n" in shown
    assert f"error: {tmp_path}/none cannot be read: No such file or directory\n" in shown
    assert len(chat.session.conversation.messages) == 2


def test_another_model_answers() -> None:
    cards = [{"id": name, "owned_by": "moeserve"} for name in ("one", "two\x1b[2J")]
    models = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps({"data": cards}).encode()
    answer = stream_of(piece("Yes."), "[DONE]")
    with raw_server([models], [models], [models], [answer]) as (url, requests):
        chat = Chat(url, model=ServedModel("one", 512))
        shown = chat.type("/model", "/model three", "/model two\x1b[2J", "?")
    assert "\n* one\n  two\n" in shown
    assert "error: the server has no model three; /model lists them\n" in shown
    assert json.loads(requests[-1].partition(b"\r\n\r\n")[2])["model"] == "two\x1b[2J"
    assert "\x1b" not in shown


# ---------------------------------------------------------------- pictures


def test_pictures_are_sent_with_the_next_question(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(PNG)
    (tmp_path / "c.png").write_bytes(PNG)
    answer = stream_of(piece("Seen."), "[DONE]")
    with raw_server([answer], [answer], [answer]) as (url, requests):
        chat = Chat(url, model=ServedModel(NAME, 512, True))
        shown = chat.type(
            f"/image {tmp_path}/a b.png", f"And {tmp_path}/c.png?", "And now?", f"/image {tmp_path}/d.png"
        )
        pasted = f"of others\n{tmp_path}/c.png"
        chat.type(pasted)
    assert shown.count("picture: ") == 2
    assert f"error: {tmp_path}/d.png cannot be read" in shown
    messages = chat.session.conversation.messages
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "image_url", "text"]
    assert messages[2]["content"] == "And now?"
    assert messages[4]["content"] == pasted, "a path in pasted text is not the user's"
    assert requests[0].count(b"data:image/png;base64,") == 2


def test_a_model_that_sees_no_pictures(server: HttpServer, chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    server.answer = say("A path.")
    shown = chat.type(f"/image {tmp_path}/a.png", f"{tmp_path}/a.png?")
    assert f"error: {NAME} cannot see pictures; serve it with --mmproj" in shown
    assert chat.session.conversation.messages[0]["content"] == f"{tmp_path}/a.png?"


def test_markdown_is_shown_formatted(server: HttpServer) -> None:
    server.answer = say("Use *", "*rg*", "*, not ", "`grep", "`.")
    formatted = Chat(server.url, terminal=True, colours=True)
    shown = formatted.type("?", "/markdown", "?")
    assert "Use \x1b[1mrg\x1b[0m, not \x1b[36mgrep\x1b[0m.\n" in shown
    assert "Markdown is shown as the model writes it\n" in shown
    assert "Use **rg**, not `grep`.\n" in shown
    assert formatted.session.conversation.messages[1]["content"] == "Use **rg**, not `grep`."
    for options in ({"terminal": True}, {"colours": True}):
        assert "Use **rg**, not `grep`.\n" in Chat(server.url, **options).type("?")


def test_an_answer_that_is_cut_shows_what_was_held(server: HttpServer) -> None:
    server.answer = say("Take **the", reason="length")
    shown = Chat(server.url, terminal=True, colours=True).type("?")
    assert "Take **the\n" in re.sub(r"\x1b\[[0-9;]*m", "", shown)


def test_an_answers_events(server: HttpServer) -> None:
    server.answer = say("<think>", "\nhm\n", "</think>", "\n\nyes", " no")
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    found = list(ChatClient(server.url, None).events(body | {"stream_options": {"include_usage": True}}))
    pieces = [event for event in found if isinstance(event, Piece)]
    assert "".join(one.reasoning for one in pieces).strip() == "hm"
    assert "".join(one.text for one in pieces) == "yes no"
    assert End("stop") in found
