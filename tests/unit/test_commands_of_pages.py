"""Every command of the documentation is one that this version takes: its program, its flags and their values.

`tests/e2e/pages/test_commands_of_pages.py` runs those that the demonstration model can answer.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from functools import cache
from itertools import dropwhile
from urllib.parse import urlsplit

import pytest

from moeserve.cli.command_line import read_options
from moeserve.cli.main import COMMANDS, given_options, parser_modules, serve_parser
from moeserve.cli.other_flags import in_our_words
from moeserve.httpserver.app import APIS, Application
from tests.support.rules.page_commands import REPOSITORY, PageCommand, commands, commands_of

# Other programs that pages tell a reader to run.
OTHERS = frozenset(
    {
        *("apt", "cd", "cmake", "docker", "echo", "git", "make", "openssl", "qemu-aarch64", "step"),
        *("claude", "cline", "copilot", "open-webui", "qwen"),  # clients
        "serve",  # Ray's
    }
)
ALL = commands()
OUTPUT_FLAGS = {
    "-s": 0,
    "-sN": 0,
    "-N": 0,
    "-X": 1,
    "-H": 1,
    "-o": 1,
    "-d": 1,
    "-F": 1,
}  # curl's, with their values


def of(*programs: str) -> list[PageCommand]:
    return [command for command in ALL if command.program in programs]


def named(command: PageCommand) -> str:
    return f"{command.page}: {' '.join(command.words)[:60]}"


def test_programs_are_known() -> None:
    """A new one is added to the list, or is a misspelling."""
    known = OTHERS | {"moeserve", "python", "curl", "pre-commit"}
    assert {(command.page, command.program) for command in ALL if command.program not in known} == set()
    assert len(of("moeserve")) > 50


@pytest.mark.parametrize("command", of("moeserve"), ids=named)
def test_flags_and_values_are_taken(command: PageCommand) -> None:
    words = list(command.words[1:])
    for place, word in enumerate(words):
        if word == "…" and words[place - 1].startswith("--"):
            words[place] = "x"
    _parse([_filled(word) for word in words if word not in ("…", "[flags]")])


def _parse(words: list[str]) -> None:
    name = words[0] if words and words[0] in COMMANDS else "serve"
    rest = words[1:] if words and words[0] in COMMANDS else words
    if name == "serve":
        ours, _ = in_our_words(rest)
        named_models, given = given_options(serve_parser(), ours)
        read_options({**given, "model": None} if len(named_models) > 1 else given, {})
        return
    if name == "bench":
        name, rest = f"bench {rest[0]}", rest[1:]
    if name == "launch" and "--" in rest:
        rest = rest[: rest.index("--")]
    if name == "plan":  # models may stand before its flags
        rest = list(dropwhile(lambda word: not word.startswith("-"), rest))
    if name == "completion":
        assert rest[0] in ("bash", "zsh", "fish")
        return
    importlib.import_module(parser_modules()[name]).command_parser().parse_args(rest)


def _filled(word: str) -> str:
    """A word with a number for each variable of the shell."""
    return re.sub(r"\$\{?\w+\}?", "1", word)


def test_a_flag_that_is_not_there_is_noticed() -> None:
    """The reader and the parsers: a continued line, a comment, a pipe and a redirection."""
    text = "```sh\nmoeserve serve a.gguf \\\n    --nothing 1 | tee log > x   # why\n```\n"
    first, second = commands_of(text)
    assert first.words == ("moeserve", "serve", "a.gguf", "--nothing", "1")
    assert second.words == ("tee", "log")
    for words in (first.words[1:], ("plan", "a.gguf", "--nothing"), ("serve", "a.gguf", "--port", "x")):
        with pytest.raises((SystemExit, Exception)):
            _parse(list(words))


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z0-9-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", of("make"), ids=named)
def test_make_has_the_target(command: PageCommand) -> None:
    asked = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    assert asked
    assert set(asked) <= targets()


@cache
def paths() -> frozenset[str]:
    return frozenset(Application(APIS, wants_key=False, model="m").paths)


@pytest.mark.parametrize("command", of("curl"), ids=named)
def test_curl_asks_a_path_with_a_body_that_is_json(command: PageCommand) -> None:
    urls, bodies = _of_curl(command.words[1:])
    (url,) = urls
    path = urlsplit(url if "//" in url else f"http://{url}").path
    assert any(re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", one), path) for one in paths()), path
    for body in bodies:
        assert isinstance(json.loads(body), dict)


def _of_curl(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The URLs and the bodies."""
    urls, bodies, rest = [], [], iter(words)
    for word in rest:
        if not word.startswith("-"):
            urls.append(word)
        elif OUTPUT_FLAGS[word]:
            value = next(rest)
            if word == "-d":
                bodies.append(value)
    return urls, bodies


@pytest.mark.parametrize("command", of("python"), ids=named)
def test_python_runs_a_file_that_is_there(command: PageCommand) -> None:
    files = [word for word in command.words[1:] if word.endswith(".py") or word.startswith("tests/")]
    modules = [module for flag, module in zip(command.words, command.words[1:], strict=False) if flag == "-m"]
    assert files or modules
    for file in files:
        assert (REPOSITORY / file.partition("::")[0]).exists(), file
    for module in modules:
        if module.partition(".")[0] in ("benchmarks", "tests", "training", "moeserve"):
            assert (REPOSITORY / module.replace(".", "/")).with_suffix(".py").exists() or (
                REPOSITORY / module.replace(".", "/") / "__main__.py"
            ).exists(), module
