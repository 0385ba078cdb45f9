"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final, NamedTuple

from moeserve.cli.run import saved
from moeserve.cli.run.answer import REASONING_VIEWS
from moeserve.cli.run.pictures import read_picture
from moeserve.cli.run.session import Session
from moeserve.cli.run.settings import SETTINGS, UNSET, read_setting
from moeserve.cli.run.terminal_text import safe_text
from moeserve.cli.running_server import models_at
from moeserve.errors import UserError


class Leave(Exception):
    """Raised to end the chat."""


class SlashCommand(NamedTuple):
    run: Callable[[Session, str], None]  # takes the text after the command's name; raises UserError
    arguments: str
    help: str


def run_slash_command(session: Session, line: str) -> bool:
    """Runs a command. Returns False if the line is a question, such as one that begins with a path. Raises Leave, and
    UserError for a command that cannot be run."""
    name, _, rest = line.partition(" ")
    if not name.startswith("/") or "/" in name[1:]:
        return False
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {close[0]}?" if close else "/help lists them"
        raise UserError(f"there is no command {name}; {meant}")
    command.run(session, rest.strip())
    return True


def _help(session: Session, rest: str) -> None:
    rows = [(f"{name} {command.arguments}".rstrip(), command.help) for name, command in COMMANDS.items()]
    rows += [
        ('"""', "begins a text of several lines, and ends it"),
        ("Ctrl-C", "stops the answer; what came is kept"),
        ("Ctrl-D", "leaves"),
    ]
    for usage, text in rows:
        session.screen.note(f"  {usage:<24} {text}")


def _clear(session: Session, rest: str) -> None:
    session.conversation.messages.clear()
    session.pictures.clear()
    session.screen.note("a new conversation")


def _system(session: Session, rest: str) -> None:
    session.conversation.system = rest
    session.screen.note("the system prompt is set" if rest else "there is no system prompt now")


def _set(session: Session, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if not name:
        for known, setting in SETTINGS.items():
            now = session.conversation.settings.get(known, UNSET)
            session.screen.note(f"  {known} {now}  ({setting.allowed}) {setting.help}")
        return
    if not value.strip():
        raise UserError(f"/set {name} needs a value, or {UNSET}")
    session.conversation.set(name, read_setting(name, value.strip()))
    session.screen.note(f"{name} is {value.strip()}")


def _show(session: Session, rest: str) -> None:
    conversation = session.conversation
    context = session.model.context_length
    rows = {
        "model": conversation.model,
        "server": session.client.url,
        "context": "unknown" if context is None else f"{context} tokens",
        "pictures": "yes" if session.model.sees_pictures else "no",
        "system prompt": conversation.system or "none",
        "settings": ", ".join(f"{name} {value}" for name, value in conversation.settings.items()) or UNSET,
        "conversation": f"{len(conversation.messages)} messages",
    }
    for name, value in rows.items():
        session.screen.note(f"  {name:<14} {value}")


def _model(session: Session, rest: str) -> None:
    models = models_at(session.client.url, session.client.api_key, any_owner=True)
    chosen = next((model for model in models if model.name == rest), None)
    if rest and chosen is None:
        raise UserError(f"the server has no model {rest}; /model lists them")
    if chosen is not None:
        session.model, session.conversation.model = chosen, chosen.name
        session.screen.note(f"{chosen.name} answers from now on")
        return
    for model in models:
        session.screen.note(f"{'*' if model.name == session.model.name else ' '} {model.name}")


def _image(session: Session, rest: str) -> None:
    if not rest:
        raise UserError("/image needs the path of a picture")
    if not session.model.sees_pictures:
        raise UserError(
            f"{session.model.name} cannot see pictures; serve it with --mmproj if it has a vision tower"
        )
    path = rest.strip("'\"")
    session.add_picture(read_picture(path))


def _reasoning(session: Session, rest: str) -> None:
    if rest in REASONING_VIEWS:
        session.reasoning_view = rest
        session.screen.note(f"reasoning: {rest}")
    elif rest:
        raise UserError(f"/reasoning: must be {', '.join(REASONING_VIEWS)}, not {rest!r}")
    elif session.last_reasoning:
        session.screen.reasoning(safe_text(session.last_reasoning).rstrip() + "\n")
    else:
        session.screen.note("the last answer has no reasoning")


def _verbose(session: Session, rest: str) -> None:
    session.verbose = not session.verbose
    session.screen.note(f"figures behind an answer: {'on' if session.verbose else 'off'}")


def _markdown(session: Session, rest: str) -> None:
    session.formatted = not session.formatted
    how = "formatted" if session.formatted else "as the model writes it"
    session.screen.note(f"Markdown is shown {how}")


def _save(session: Session, rest: str) -> None:
    if not rest:
        raise UserError("/save needs a path")
    saved.save(session.conversation, rest)
    session.screen.note(f"saved in {rest}")


def _load(session: Session, rest: str) -> None:
    if not rest:
        raise UserError("/load needs a path")
    saved.load(session.conversation, rest)
    session.screen.note(f"{len(session.conversation.messages)} messages of {rest}")


def _bye(session: Session, rest: str) -> None:
    raise Leave


COMMANDS: Final = {
    "/help": SlashCommand(_help, "", "lists the commands"),
    "/clear": SlashCommand(_clear, "", "begins a new conversation"),
    "/system": SlashCommand(_system, "[TEXT]", "sets the system prompt, or removes it"),
    "/set": SlashCommand(_set, "[NAME VALUE]", f"lists the settings, or sets one; {UNSET}: the server's own"),
    "/show": SlashCommand(_show, "", "shows model, server, settings and system prompt"),
    "/model": SlashCommand(_model, "[NAME]", "lists the server's models, or has another answer from now on"),
    "/image": SlashCommand(_image, "PATH", "adds a picture to the next question"),
    "/reasoning": SlashCommand(
        _reasoning, f"[{'|'.join(REASONING_VIEWS)}]", "shows the last reasoning, or sets how it is shown"
    ),
    "/verbose": SlashCommand(_verbose, "", "switches the figures behind an answer on or off"),
    "/markdown": SlashCommand(_markdown, "", "shows answers as the model writes them, or formatted again"),
    "/save": SlashCommand(_save, "PATH", "writes the conversation to a new file"),
    "/load": SlashCommand(_load, "PATH", "goes on with a saved conversation"),
    "/bye": SlashCommand(_bye, "", "leaves, as /exit and /quit do"),
    "/exit": SlashCommand(_bye, "", "leaves"),
    "/quit": SlashCommand(_bye, "", "leaves"),
}
LEAVING: Final = frozenset(name for name, command in COMMANDS.items() if command.run is _bye)
