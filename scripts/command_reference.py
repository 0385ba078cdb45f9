"""docs/reference/commands.md, from the parsers of the commands."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Iterator

from moeserve.cli.command_line import flag_name, help_of
from moeserve.cli.main import COMMANDS, parser_modules
from moeserve.config import ServerConfig


def commands_page(made: str) -> Iterator[str]:
    yield from (
        "# Commands",
        "",
        made,
        "",
        "`moeserve COMMAND --help` prints the same. [flags.md](flags.md) has the flags of `moeserve serve`; a command",
        "that takes some of them takes their environment variables, too.",
        "",
        "| command | |",
        "|---|---|",
    )
    modules = parser_modules()
    for name, command in COMMANDS.items():
        sections = [words for words in modules if words.split()[0] == name]
        linked = ", ".join(f"[`{words}`](#moeserve-{words.replace(' ', '-')})" for words in sections)
        yield f"| {linked or f'`{name}`'} | {command.help} |"
    yield ""
    for name, module in modules.items():
        yield from _section(name, importlib.import_module(module).command_parser())


def _section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"## moeserve {name}", "", (parser.description or "").strip(), "")
    shared = {flag_name(option.name): help_of(option) for option in dataclasses.fields(ServerConfig)}
    rows: list[str] = []
    of_server: list[str] = []
    for action in parser._actions:
        names = list(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help for one in action._choices_actions}
            rows += [f"| `{choice}` | {helps.get(choice) or ''} |" for choice in action.choices]
        elif "--help" in names:
            continue
        elif names and shared.get(names[-1]) == action.help:
            of_server.append(f"`{names[-1]}`")
        else:
            rows.append(f"| {_shown(action)} | {_help(action)} |")
    if rows:
        yield from ("| argument | |", "|---|---|", *rows, "")
    if of_server:
        yield from (f"Also these of [the server's flags](flags.md): {', '.join(of_server)}.", "")


def _shown(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{metavar}`"
    return f"`{', '.join(action.option_strings)}`" + ("" if action.nargs == 0 else f" {metavar}")


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return text.replace("|", "\\|")
