"""The command line: `moeserve [serve] --flags`, `python launch.py`, `python -m moeserve`, all the same.

A command is a function of its arguments that returns the exit code; each imports what it needs when it
runs.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from moeserve.cli.certificate_flags import check_certificate
from moeserve.cli.closed_output import with_output
from moeserve.cli.command_line import (
    flag_name,
    options_parser,
    read_options,
    resolve,
    unknown_variables,
)
from moeserve.cli.other_flags import hint, in_our_words
from moeserve.cli.several_models import check_single, several_models, wants_several
from moeserve.cli.unicode_values import check_unicode
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, UserError
from moeserve.launcher.exit_codes import EXIT_USAGE
from moeserve.processes.cpu_baseline import missing_instructions
from moeserve.processes.runtime_paths import has_working_directory
from moeserve.processes.slow_file_systems import slow_file_system
from moeserve.remote.options import check_server

log = logging.getLogger(__name__)

_WORDS_FOR_FLAGS: Final = ("help", "version")  # commands of git, Docker and Ollama
_SERVING: Final = ("serve", "worker")  # commands whose output is a log


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the first argument names it and may be left out for `serve`. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not has_working_directory():
        print("moeserve: error: the working directory has been deleted; start from another", file=sys.stderr)
        return EXIT_USAGE
    if lacking := missing_instructions():
        print(
            f"moeserve: error: this CPU has no {', '.join(lacking)}, for which NumPy and PyTorch are compiled; in a "
            "virtual machine choose the CPU type host, else use another machine",
            file=sys.stderr,
        )
        return EXIT_USAGE
    name = "serve"
    if arguments and not arguments[0].startswith("-") and not _is_model(arguments[0]):
        name = arguments.pop(0)
    if name in _WORDS_FOR_FLAGS:  # `moeserve help run`, `moeserve help bench engine`
        if name == "version" and arguments:
            serve_parser().error(f"unrecognized arguments: {' '.join(arguments)}")
        flag, name = f"--{name}", "serve"
        before = itertools.takewhile(lambda word: word != "--", arguments)  # what follows is an agent's
        arguments = [word for word in before if not word.startswith("-")]
        if arguments and arguments[0] not in _WORDS_FOR_FLAGS:
            name = arguments.pop(0)
        arguments = [*arguments, flag] if name != "serve" else [flag]
    if not name:
        serve_parser().error("the first word is empty; name a model or a command")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        serve_parser().error(
            f"there is no command {name!r}, only {', '.join(COMMANDS)}; a model is named by --model{meant}"
        )
    if name in _SERVING:
        return COMMANDS[name].run(arguments)
    return with_output(COMMANDS[name].run, arguments)


def _is_model(word: str) -> bool:
    """Returns whether the first word is a model, not a command: `moeserve FILE`."""
    if word in COMMANDS or word in _WORDS_FOR_FLAGS:
        return False
    return os.path.exists(word) or "/" in word or word.endswith(".gguf")


class Command(NamedTuple):
    run: Callable[[list[str]], int]
    help: str


def serve(arguments: list[str]) -> int:
    """Runs the server. Exit codes: those of `launcher/exit_codes.py`; 2 for a bad flag or environment variable."""
    parser = serve_parser()
    from moeserve.launcher.launch import launch
    from moeserve.processes.logs import set_up_logging

    words, notes = in_our_words(arguments)
    try:
        named, given = given_options(parser, words)
        if wants_several(named, given, os.environ):
            return serve_several(parser, named, given, notes)
        asked = read_options(given, os.environ)
        check_single(asked)
        check_server(asked)
        check_certificate(asked)
    except UserError as error:
        parser.error(str(error))
    set_up_logging("launcher", asked.log_level, asked.log_format)
    for note in notes:
        log.info("%s", note)
    if unknown := unknown_variables(os.environ):
        log.warning("environment variable %s has no effect: there is no such option", ", ".join(unknown))
    try:
        config = resolve(asked)
        check_unicode(config)
    except UserError as error:
        log.error("%s", error)
        return EXIT_USAGE
    if not asked.model:
        log.info(
            "no --model was given: this is the small demonstration model, which can do a few things only"
        )
    elif where := slow_file_system(Path(config.model)):
        log.info("the model is on %s: if loading takes long, copy it to a disk of this machine", where)
    return launch(config)


def serve_several(
    parser: argparse.ArgumentParser,
    named: Sequence[str],
    given: Mapping[str, str | list[str] | None],
    notes: Sequence[str],
) -> int:
    """Runs a server with several models. Exit codes: those of `serve`."""
    from moeserve.front.launch import launch_several
    from moeserve.processes.logs import set_up_logging

    try:
        # Checked before models are looked for, because that may download them.
        common = read_options(
            {"log_level": given.get("log_level"), "log_format": given.get("log_format")}, {}
        )
        set_up_logging("launcher", common.log_level, common.log_format)
        for note in notes:
            log.info("%s", note)
        front = several_models(named, given, os.environ)
        check_certificate(front.common)
    except ConfigError as error:
        parser.error(str(error))
    except UserError as error:
        log.error("%s", error)
        return EXIT_USAGE
    if unknown := unknown_variables(os.environ):
        log.warning("environment variable %s has no effect: there is no such option", ", ".join(unknown))
    return launch_several(front)


def worker(arguments: list[str]) -> int:
    from moeserve.cli.remote_worker import main as run_worker

    return run_worker(arguments)


def bench(arguments: list[str]) -> int:
    """Runs `bench engine|serve|trace|steps …`. Exit code 2 for anything else."""
    from moeserve.cli.bench.commands import main as run_bench

    return run_bench(arguments)


def simulate(arguments: list[str]) -> int:
    from moeserve.cli.simulate.command import main as run_simulate

    return run_simulate(arguments)


def plan(arguments: list[str]) -> int:
    from moeserve.cli.plan.command import main as run_plan

    return run_plan(arguments)


def compare_dumps(arguments: list[str]) -> int:
    from moeserve.cli.compare_dumps.command import main as run_compare

    return run_compare(arguments)


def cache(arguments: list[str]) -> int:
    from moeserve.kv.disk.command import main as run_cache

    return run_cache(arguments)


def reload(arguments: list[str]) -> int:
    from moeserve.launcher.reload import main as run_reload

    return run_reload(arguments)


def doctor(arguments: list[str]) -> int:
    from moeserve.cli.doctor.command import main as run_doctor

    return run_doctor(arguments)


def pull(arguments: list[str]) -> int:
    from moeserve.cli.models.pull import main as run_pull

    return run_pull(arguments)


def list_models(arguments: list[str]) -> int:
    from moeserve.cli.models.list import main as run_list

    return run_list(arguments)


def show(arguments: list[str]) -> int:
    from moeserve.cli.models.show import main as run_show

    return run_show(arguments)


def rm(arguments: list[str]) -> int:
    from moeserve.cli.models.rm import main as run_rm

    return run_rm(arguments)


def launch_agent(arguments: list[str]) -> int:
    from moeserve.cli.agents.command import main as run_launch

    return run_launch(arguments)


def run_chat(arguments: list[str]) -> int:
    from moeserve.cli.run.command import main as run_command

    return run_command(arguments)


def complete(arguments: list[str]) -> int:
    from moeserve.cli.completion import main as run_completion

    commands = {name: command.help for name, command in COMMANDS.items()}
    parsers = {"serve": serve_parser} | {
        words: importlib.import_module(module).command_parser for words, module in parser_modules().items()
    }
    return run_completion(arguments, commands, parsers)


def parser_modules() -> dict[str, str]:
    """Returns the modules with a `command_parser()`, by the words of their commands, including the commands of
    `bench`."""
    from moeserve.cli.bench.commands import COMMANDS as MEASUREMENTS

    return PARSERS | {f"bench {name}": f"moeserve.cli.bench.{name}" for name in MEASUREMENTS}


# The modules of the other commands, with a `command_parser()` each.
PARSERS = {
    "doctor": "moeserve.cli.doctor.command",
    "run": "moeserve.cli.run.command",
    "launch": "moeserve.cli.agents.command",
    "pull": "moeserve.cli.models.pull",
    "list": "moeserve.cli.models.list",
    "show": "moeserve.cli.models.show",
    "rm": "moeserve.cli.models.rm",
    "worker": "moeserve.cli.remote_worker",
    "reload": "moeserve.launcher.reload",
    "plan": "moeserve.cli.plan.command",
    "simulate": "moeserve.cli.simulate.command",
    "cache": "moeserve.kv.disk.command",
    "compare-dumps": "moeserve.cli.compare_dumps.command",
}
COMMANDS: dict[str, Command] = {
    "serve": Command(serve, "serve a model (the default)"),
    "doctor": Command(doctor, "check this machine, and name remedies for what is wrong"),
    "run": Command(run_chat, "chat in the terminal, or ask one question"),
    "launch": Command(
        launch_agent,
        "start an agent (Claude Code, Codex, ...) that uses the server; starts the server if needed",
    ),
    "pull": Command(pull, "download a model from the Hugging Face Hub"),
    "list": Command(
        list_models, "list the downloaded models, their sizes, and the memory that each would need"
    ),
    "show": Command(show, "show one model, and the memory that it would need"),
    "rm": Command(rm, "remove a downloaded model"),
    "worker": Command(worker, "compute for a server on another machine"),
    "reload": Command(reload, "upgrade without downtime: start the installed version and hand over to it"),
    "plan": Command(plan, "predict placement, memory and speed without loading a model"),
    "bench": Command(bench, "measure the engine, its steps, or a running server"),
    "simulate": Command(simulate, "run the scheduler under a workload, in virtual time"),
    "cache": Command(cache, "list, verify or prune the folder of --kv-disk"),
    "compare-dumps": Command(compare_dumps, "find the first difference between two dumps of --debug-dump"),
    "completion": Command(
        complete, "print a script that completes commands and flags, for bash, zsh or fish"
    ),
}


def serve_parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<14} {command.help}" for name, command in COMMANDS.items())
    return options_parser("moeserve", f"commands:\n{commands}\n\n")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> ServerConfig:
    """Returns the options as the user gave them, not resolved; the first argument may be the model, without its flag.
    Raises ConfigError, which names the flag or the variable."""
    _, given = given_options(parser, arguments)
    return read_options(given, environment)


def given_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str | list[str] | None]]:
    """Returns the models that are named before the flags, and the flags' texts by field name. A single model named in
    this way is also returned as --model. Raises ConfigError if a model is named twice."""
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    found, unknown = parser.parse_known_args(arguments[len(named) :])
    unknown = [word for word in named if word in COMMANDS] + unknown
    if unknown:
        flags = map(flag_name, vars(found))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint(unknown, flags, arguments)}")
    given = vars(found)
    if len(named) == 1 and not given["models_file"]:
        if given["model"] not in (None, named[0]):
            raise ConfigError(
                f"two models are named, {named[0]} and --model {given['model']}; name several before the flags"
            )
        given["model"] = named[0]
    return named, given
