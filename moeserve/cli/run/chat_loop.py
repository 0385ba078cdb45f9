"""The loop of a chat in the terminal: reads what the user types, and asks the question or runs the command, until the
user leaves."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.cli.run.asking import sentence
from moeserve.cli.run.history import History
from moeserve.cli.run.interrupts import single_interrupt
from moeserve.cli.run.line_reader import Entry, LineReader
from moeserve.cli.run.pictures import paths_in, read_picture
from moeserve.cli.run.session import Session
from moeserve.cli.run.slash_commands import LEAVING, Leave, run_slash_command
from moeserve.cli.run.terminal_text import safe_line
from moeserve.errors import UserError


def run_chat(session: Session, history: History, read: Callable[[str], str] = input) -> None:
    """Runs the chat until the user leaves: by /bye, Ctrl-D, or Ctrl-C twice at the prompt. read: shows a prompt and
    returns a line."""
    screen, reader = session.screen, LineReader(history.entries(), read)
    _tell_problem(session, history)
    screen.note(f"{safe_line(session.model.name)}; /help lists the commands, Ctrl-D leaves")
    is_leaving = False  # the last input at the prompt was Ctrl-C
    while True:
        try:
            entry = reader.read()
        except EOFError:
            screen.note("")
            return
        except KeyboardInterrupt:
            screen.note("")
            if is_leaving:
                return
            is_leaving = True
            screen.note("Ctrl-C again, Ctrl-D or /bye leaves")
            continue
        is_leaving = False
        try:
            with single_interrupt():
                _take(session, history, entry)
        except Leave:
            return
        except KeyboardInterrupt:
            screen.note("(stopped)")
        except UserError as error:
            screen.note(f"error: {safe_line(sentence(error))}")


def _take(session: Session, history: History, entry: Entry) -> None:
    """Handles one entry: a command or a question. Raises Leave, UserError, KeyboardInterrupt."""
    if not entry.text.strip():
        return
    if entry.text not in LEAVING:
        history.add(entry.text)
        _tell_problem(session, history)
    if entry.is_line:
        if run_slash_command(session, entry.text):
            return
        if session.model.sees_pictures:
            # Not in pasted text: somebody else may have written it, and must not get the user's files sent.
            for path in paths_in(entry.text):
                session.add_picture(read_picture(path))
    session.ask(entry.text)


def _tell_problem(session: Session, history: History) -> None:
    if history.problem:
        session.screen.note(history.problem)
        history.problem = ""
