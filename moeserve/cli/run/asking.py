"""Sends a question to the server and shows its answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Final

from moeserve.cli.run.answer import AnswerView, figures_line
from moeserve.cli.run.client import ChatClient
from moeserve.cli.run.conversation import Conversation
from moeserve.cli.run.events import ChatError, NoServer
from moeserve.cli.run.screen import Screen
from moeserve.errors import UserError

LOADING: Final = "loading"  # the error code of a server that is loading its model
TOO_LONG: Final = "context_length_exceeded"


def answer_question(
    client: ChatClient,
    conversation: Conversation,
    view: AnswerView,
    wait_until_ready: Callable[[], object],
    revive: Callable[[], bool],
) -> None:
    """Streams the answer to the conversation's last question into `view`. If the model is still loading, waits and asks
    again; likewise if the server is gone and `revive` could start it. Raises ChatError, UserError if the server is
    gone, and KeyboardInterrupt for Ctrl-C; `view` then holds the answer so far, and its last line is ended."""
    try:
        try:
            _stream(client, conversation, view)
        except NoServer:
            if not revive():
                raise
            _stream(client, conversation, view)
        except ChatError as error:
            if error.code != LOADING or view.text:
                raise
            wait_until_ready()
            _stream(client, conversation, view)
    finally:
        view.end()


def _stream(client: ChatClient, conversation: Conversation, view: AnswerView) -> None:
    with closing(client.events(conversation.body())) as events:  # type: ignore[type-var]  # a generator
        for event in events:
            view.take(event)


def tell_end(screen: Screen, view: AnswerView, verbose: bool) -> None:
    """Prints the lines that follow a complete answer."""
    if not view.text and view.finish_reason != "length":
        screen.note("(the answer has no text)")
    if view.finish_reason == "length":
        screen.note("(the answer was cut: max_tokens, or the end of the context)")
    if verbose and view.figures is not None:
        screen.heading(figures_line(view.figures))


def sentence(error: UserError) -> str:
    """Returns the error as one line, with a remedy if there is one in this program."""
    remedy = "; /clear begins a new conversation" if getattr(error, "code", None) == TOO_LONG else ""
    return f"{error}{remedy}"
