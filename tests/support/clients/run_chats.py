"""`moeserve run`'s chats without a terminal."""

from __future__ import annotations

import io
import signal
import threading
from typing import Any

from moeserve.cli.run.chat_loop import run_chat
from moeserve.cli.run.client import ChatClient
from moeserve.cli.run.conversation import Conversation
from moeserve.cli.run.history import History
from moeserve.cli.run.screen import Screen
from moeserve.cli.run.session import Session
from moeserve.cli.running_server import ServedModel
from tests.support.servers.http_harness import NAME

REASONED = ("<think>", "\nLet me", " see.\n", "</think>", "\n\nHere", " you are.")
Line = str | type[BaseException]


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


def interrupt_soon() -> None:
    """Ctrl-C while the main thread waits for what comes next. Another thread's signal would not end that wait."""
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
