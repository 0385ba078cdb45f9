"""`moeserve completion bash|zsh|fish`: prints a script that completes commands, flags and their choices in that shell.

The flags are read from the commands' own parsers, so the script matches the installed version.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

# Placeholders of paths in `--help`.
_PATHS: Final = ("FILE", "FOLDER", "PATH", "DIRECTORY", "MODEL")

_USAGE: Final = """usage: moeserve completion {bash,zsh,fish}

Prints a script that completes moeserve's commands, flags and their choices:

  bash   source <(moeserve completion bash)          in ~/.bashrc
  zsh    source <(moeserve completion zsh)           in ~/.zshrc, after compinit
  fish   moeserve completion fish | source           in ~/.config/fish/config.fish"""


@dataclass(frozen=True)
class Flag:
    name: str  # including the dashes
    choices: tuple[str, ...]
    takes_path: bool
    help: str


def main(arguments: list[str], commands: Mapping[str, str], parsers: Mapping[str, Parser]) -> int:
    """Prints the completion script of the shell that `arguments` name, and returns the exit code. `commands`: names and
    descriptions. `parsers`: makers of the commands' parsers, by the commands' words, such as "bench serve". Exit code 2
    if no supported shell is named."""
    if len(arguments) == 1 and arguments[0] in SHELLS:
        flags = {words: list(_flags(parser)) for words, parser in _command_lines(parsers)}
        print("\n".join(SHELLS[arguments[0]](commands, flags)))
        return 0
    asked = arguments[:1] in (["--help"], ["-h"])
    print(_USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


Parser = Callable[[], argparse.ArgumentParser]
Flags = Mapping[str, list[Flag]]


def _command_lines(parsers: Mapping[str, Parser]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the words and the parser of each command. A parser with subcommands is replaced by theirs."""
    for words, make in parsers.items():
        parser = make()
        several = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not several:
            yield words, parser
        for action in several:
            for name, one in action.choices.items():
                yield f"{words} {name}", one


def _second_words(flags: Flags) -> dict[str, list[str]]:
    """Returns the possible second words of each command that needs one."""
    found: dict[str, list[str]] = {}
    for first, second in (words.split() for words in flags if " " in words):
        found.setdefault(first, []).append(second)
    return found


def _flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in parser._actions:
        for name in action.option_strings:
            if not name.startswith("--"):
                continue
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            choices = tuple(str(choice) for choice in action.choices or ())
            if metavar.startswith("{"):  # choices of a ServerConfig option, which the parser does not check
                choices = tuple(metavar.strip("{}").split(","))
            yield Flag(name, choices, metavar in _PATHS, (action.help or "").replace("%%", "%"))


def _bash(commands: Mapping[str, str], flags: Flags) -> Iterator[str]:
    """Yields the lines of a bash script. The word before the cursor decides what is completed: the choices of that
    flag, else the flags of the command, else paths."""
    yield "_moeserve() {"
    yield "  COMPREPLY=()"
    yield '  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words="${COMP_WORDS[1]}"'
    second_words = _second_words(flags)
    for first in second_words:
        yield f'  [[ $words == {first} ]] && words="{first} ${{COMP_WORDS[2]}}"'
    yield "  if (( COMP_CWORD == 1 )) && [[ $word != -* ]]; then"
    yield f'    COMPREPLY=($(compgen -W {shlex.quote(" ".join(commands))} -- "$word")); return'
    yield "  fi"
    for first, seconds in second_words.items():
        yield f"  if (( COMP_CWORD == 2 )) && [[ $before == {first} ]]; then"
        yield f'    COMPREPLY=($(compgen -W {shlex.quote(" ".join(seconds))} -- "$word")); return'
        yield "  fi"
    yield '  case "$words" in'
    for words, of_command in flags.items():
        if words != "serve":
            yield from _bash_case(f'"{words}"', of_command)
    yield from _bash_case("*", flags["serve"])  # the word "serve" may be left out
    yield "  esac"
    yield "}"
    yield "complete -o default -F _moeserve moeserve"  # -o default: complete paths if nothing else fits


def _bash_case(pattern: str, flags: list[Flag]) -> Iterator[str]:
    yield f"    {pattern})"
    yield '      case "$before" in'
    for flag in flags:
        if flag.choices:
            choices = shlex.quote(" ".join(flag.choices))
            yield f'        {flag.name}) COMPREPLY=($(compgen -W {choices} -- "$word")); return ;;'
    if paths := "|".join(flag.name for flag in flags if flag.takes_path):
        yield f"        {paths}) return ;;"
    yield "      esac"
    names = shlex.quote(" ".join(flag.name for flag in flags))
    yield f'      [[ $word == -* ]] && COMPREPLY=($(compgen -W {names} -- "$word")) ;;'


def _zsh(commands: Mapping[str, str], flags: Flags) -> Iterator[str]:
    yield "autoload -U +X bashcompinit && bashcompinit"
    yield from _bash(commands, flags)


def _fish(commands: Mapping[str, str], flags: Flags) -> Iterator[str]:
    yield "complete -c moeserve -n __fish_use_subcommand -f"
    for name, text in commands.items():
        yield f"complete -c moeserve -n __fish_use_subcommand -a {name} -d {_fish_quoted(text)}"
    for words, of_command in flags.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words.split())
        for flag in of_command:
            value = f" -x -a {_fish_quoted(' '.join(flag.choices))}" if flag.choices else ""
            value = " -r -F" if flag.takes_path else value
            about = _fish_quoted(flag.help.split("; ")[0][:80])
            yield f"complete -c moeserve -n {_fish_quoted(seen)} -l {flag.name[2:]}{value} -d {about}"
    for first, seconds in _second_words(flags).items():
        names = " ".join(seconds)
        before = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {names}"
        yield f"complete -c moeserve -n {_fish_quoted(before)} -f -a {_fish_quoted(names)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Final = {"bash": _bash, "zsh": _zsh, "fish": _fish}
