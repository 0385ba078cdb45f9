"""For the tests of `moeserve run`: httpserver with the test in place of its engine, and chats without a terminal."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from moeserve.cli.run.chat_loop import run_chat
from moeserve.cli.run.client import ChatClient
from moeserve.cli.run.conversation import Conversation
from moeserve.cli.run.history import History
from moeserve.cli.run.screen import Screen
from moeserve.cli.run.session import Session
from moeserve.cli.running_server import ServedModel
from tests.support.http_harness import NAME, HttpServer, http_server, tokens_of

REASONED = ("<think>", "\nLet me", " see.\n", "</think>", "\n\nHere", " you are.")
Line = str | type[BaseException]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def server(shared_server: HttpServer) -> HttpServer:
    shared_server.begin_anew()
    return shared_server


def prompt_of(server: HttpServer) -> str:
    """The last request's."""
    return server.tokenizer.decode(tokens_of(server.requests[-1]), skip_special=False)


class Chat:
    """A session whose user types given lines; `shown` is what the screen has."""

    def __init__(self, url: str, *, terminal: bool = False, colours: bool = False, **fields: Any) -> None:
        chat = self
        self.interrupt_at: str | None = None  # what Ctrl-C follows as soon as it is shown

        class Stream(io.StringIO):
            def isatty(self) -> bool:
                return terminal

            def write(self, text: str) -> int:
                written = super().write(text)
                if chat.interrupt_at is not None and chat.interrupt_at in self.getvalue():
                    chat.interrupt_at = None
                    interrupt_soon()
                return written

        self._stream = Stream()
        self._history = fields.pop("history", History(None))
        environment = {} if colours else {"NO_COLOR": "1"}
        self.session = Session(
            ChatClient(url, None),
            fields.pop("model", ServedModel(NAME, 512)),
            Conversation(NAME),
            Screen(self._stream, self._stream, environment),
            fields.pop("wait_until_ready", lambda: None),
            **fields,
        )

    @property
    def shown(self) -> str:
        return self._stream.getvalue()

    def type(self, *lines: Line) -> str:
        """The user types lines, or raises what Ctrl-C and Ctrl-D raise, and then Ctrl-D. Returns what came."""
        before = len(self.shown)
        typed = iter([*lines, EOFError])

        def read(prompt: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        run_chat(self.session, self._history, read)
        return self.shown[before:]


@pytest.fixture
def chat(server: HttpServer) -> Chat:
    return Chat(server.url)


def interrupt_soon() -> None:
    """Ctrl-C while the main thread waits for what comes next. Another thread's signal would not end that wait."""
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()


@contextmanager
def raw_server(
    *answers: Sequence[bytes] | Callable[[socket.socket], None],
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers one connection after the other with these bytes, whatever is asked, and closes it. Yields
    its address, and the requests that it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []

    def serve() -> None:
        for index, answer in enumerate(answers):
            connection, _ = listener.accept()
            if index == len(answers) - 1:
                listener.close()  # a further connection is refused rather than left to wait
            with connection:
                requests.append(_request(connection))
                if callable(answer):
                    answer(connection)
                else:
                    for part in answer:
                        connection.sendall(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.close()


def _request(connection: socket.socket) -> bytes:
    """Head and body."""
    with connection.makefile("rb") as file:
        lines = list(iter(file.readline, b"\r\n"))
        (length,) = [
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        ] or [0]
        return b"".join(lines) + b"\r\n" + file.read(length)


def stream_of(*events: str) -> bytes:
    """A whole answer of server-sent events."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        + "".join(f"data: {event}\n\n" for event in events).encode()
    )


def piece(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
