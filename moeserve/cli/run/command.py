"""`moeserve run [MODEL] [QUESTION]`: the command line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from moeserve.cli.background_server import (
    SERVER_OPTIONS,
    SERVER_TEXTS,
    running_model,
    server_for,
    wait_until_ready,
)
from moeserve.cli.command_line import add_shared_options, flag_name, read_options
from moeserve.cli.run.answer import REASONING_VIEWS
from moeserve.cli.run.asking import sentence
from moeserve.cli.run.chat_loop import run_chat
from moeserve.cli.run.client import ChatClient, address_of
from moeserve.cli.run.conversation import Conversation
from moeserve.cli.run.history import History, history_path
from moeserve.cli.run.pictures import read_picture
from moeserve.cli.run.question import NoQuestion, read_question, text_of_argument
from moeserve.cli.run.screen import Screen
from moeserve.cli.run.session import Session
from moeserve.cli.run.settings import read_assignment
from moeserve.cli.run.terminal_text import safe_line
from moeserve.cli.running_server import ServedModel
from moeserve.config import ServerConfig
from moeserve.errors import UserError

_OPTIONS: Final = (*SERVER_OPTIONS, "mmproj")
_STOPPED: Final = 130


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve run",
        usage="%(prog)s [MODEL] [QUESTION] [options]",
        description="Chat in the terminal with the model of the server at --host and --port, or at --url. If no "
        "server runs at --host and --port, the command starts one with MODEL (default: the demonstration "
        "model) and stops it at its end. With a QUESTION, or input from a pipe, it writes only the "
        "answer to standard output.",
        epilog="Example: git diff | moeserve run org/repo-GGUF:Q4_K_M 'Write a commit message.'",
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        metavar="MODEL",
        nargs="*",
        help="a model in any form that --model accepts; words after it are the question",
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the question, for use without MODEL")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="use the server at this URL, on this or another machine, and never start one (default: the server at "
        "--host and --port)",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt (default: none)")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set a sampling parameter, such as temperature=0.7, as /set does in a chat; repeat the flag for more "
        "(default: the server's)",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="file with a picture that the question is about; repeat the flag for more pictures. The model needs a "
        "vision tower (--mmproj)",
    )
    parser.add_argument(
        "--reasoning",
        choices=REASONING_VIEWS,
        default="fold",
        help="how the model's reasoning is shown. fold: as one line; show: in full, dimmed; hide: not at all "
        "(default: fold)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show tokens and tokens per second after each answer"
    )
    parser.add_argument(
        "--no-markdown",
        action="store_true",
        help="do not render Markdown: show answers as the model writes them (always so if the output is no terminal)",
    )
    parser.add_argument(
        "--no-history", action="store_true", help="neither read nor write the history of questions"
    )
    add_shared_options(parser, _OPTIONS, **SERVER_TEXTS)
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 for an error, 2 for bad arguments, 130 if Ctrl-C stopped the answer to a single
    question. Raises BrokenPipeError if nothing reads the output any more."""
    parser = command_parser()
    args = parser.parse_intermixed_args(arguments)
    try:
        asked = _read(args)
    except UserError as error:
        parser.error(safe_line(str(error)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack characters that the model has
    is_chat = not asked.question and sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty()
    screen = Screen(sys.stdout, sys.stdout if is_chat else sys.stderr, os.environ)
    try:
        _run(asked, args, screen, is_chat)
    except NoQuestion as error:
        parser.error(str(error))
    except UserError as error:
        screen.clear_status()
        # The error has several lines only if a server did not start: the last lines of its log.
        lines = map(safe_line, sentence(error).splitlines())
        print("moeserve run: " + "\n".join(lines), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        screen.clear_status()
        return _STOPPED
    return 0


class _Asked(NamedTuple):
    config: ServerConfig
    given: dict[str, str | list[str] | None]  # the server's options as they were given
    model: str  # as it was given; "" if none was
    url: str | None  # of --url
    question: str  # "" if none was given
    system: str  # system prompt; "" if none was given
    settings: dict[str, Any]


def _read(args: argparse.Namespace) -> _Asked:
    """Interprets the command's arguments. Raises UserError if they are invalid or contradict each other."""
    given: dict[str, str | list[str] | None] = {name: getattr(args, name) for name in _OPTIONS}
    words: list[str] = list(args.words)
    if words and given["model"] is None:
        given["model"] = model = words.pop(0)
        if " " in model and not os.path.exists(model):
            raise UserError("give the question after MODEL; without a MODEL, give it as --prompt TEXT")
    if words and args.prompt is not None:
        raise UserError("--prompt: the question is given twice, as an argument too; leave one of them out")
    if args.url is not None:
        for name in set(_OPTIONS) - {"model", "api_key"}:
            if given[name] is not None:
                raise UserError(f"{flag_name(name)}: has no effect on the server of --url; leave it out")
    return _Asked(
        read_options(given, os.environ),
        given,
        str(given["model"] or ""),
        None if args.url is None else address_of(args.url),
        text_of_argument(args.prompt if args.prompt is not None else " ".join(words), "the question"),
        text_of_argument(args.system or "", "--system"),
        dict(map(read_assignment, args.set)),
    )


def _run(asked: _Asked, args: argparse.Namespace, screen: Screen, is_chat: bool) -> None:
    pictures = [read_picture(path) for path in args.image]
    question = "" if is_chat else read_question(asked.question, sys.stdin, pictures)
    with _server(asked) as (client, model, revive):
        if pictures and not model.sees_pictures:
            raise UserError(
                f"{model.name} cannot see pictures; name the file of its vision tower with --mmproj"
            )
        session = Session(
            client,
            model,
            Conversation(model.name, asked.system, asked.settings),
            screen,
            lambda: wait_until_ready(client.url, None),
            revive,
            # For a single question no line replaces the reasoning: there is no chat whose command could show it.
            reasoning_view="hide" if args.reasoning == "fold" and not is_chat else args.reasoning,
            verbose=args.verbose,
            formatted=not args.no_markdown,
            pictures=pictures,
        )
        if is_chat:
            run_chat(session, History(None if args.no_history else history_path(os.environ)))
        else:
            session.ask(question)


@contextmanager
def _server(asked: _Asked) -> Iterator[tuple[ChatClient, ServedModel, Callable[[], bool]]]:
    """Returns a client of the server, its model, and a function that starts the server again if this command started it
    and it has ended."""
    key = next(iter(asked.config.api_key), None)
    if asked.url is not None:
        # MOESERVE_MODEL is for servers on this machine.
        model = running_model(asked.url, key, asked.model, any_owner=True)
        yield ChatClient(asked.url, key), model, lambda: False
        return
    with server_for(asked.config, asked.given, needs_model=False) as found:
        yield ChatClient(found.url, key), found.model, found.revive
