"""`moeserve launch AGENT`: the command line."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from moeserve.cli.agents.agents import AGENTS, Endpoint, Start
from moeserve.cli.background_server import SERVER_OPTIONS, SERVER_TEXTS, server_for
from moeserve.cli.command_line import add_shared_options, read_options
from moeserve.errors import UserError

_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_NOT_INSTALLED: Final = 127  # as a shell returns


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve launch",
        usage="%(prog)s AGENT [options] [-- ARGUMENTS OF THE AGENT]",
        description="Start an agent with the URL, the API key and the model of the server at --host and --port. If "
        "no server runs there and --model names a model, the command serves it while the agent runs. The "
        "agent's own settings files are not changed. Exit code: the agent's.",
        epilog="Example: moeserve launch claude --model org/repo-GGUF:Q4_K_M --max-model-len 65536 -- --continue",
        allow_abbrev=False,
    )
    parser.add_argument("agent", metavar="AGENT", choices=AGENTS, help=", ".join(AGENTS))
    add_shared_options(parser, SERVER_OPTIONS, **SERVER_TEXTS)
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code: the agent's; 127 if it is not installed, 1 if there is no server, 2 for bad arguments."""
    parser = command_parser()
    at = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:at])
    agent = AGENTS[args.agent]
    program = shutil.which(agent.program)
    if program is None:
        print(f"moeserve launch: {agent.program} is not installed: {agent.install}", file=sys.stderr)
        return _NOT_INSTALLED
    given = {name: getattr(args, name) for name in SERVER_OPTIONS}
    try:
        config = read_options(given, os.environ)
        with server_for(config, given) as (url, model, _):
            key = next(iter(config.api_key), None)
            endpoint = Endpoint(url, model.name, model.context_length, key)
            start = agent.start(program, endpoint, arguments[at + 1 :])
            return run(replace(start, environment=past_proxies(os.environ, url) | start.environment))
    except UserError as error:
        print(f"moeserve launch: {error}", file=sys.stderr)
        return 1


def past_proxies(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Returns the environment variables that make a client connect directly to the server at `url`, if the environment
    sets a proxy that the client would use otherwise. Empty if no proxy is set, if `*` already switches all proxies off,
    or if the server is on another machine."""
    host = urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    if not is_here or not any(environment.get(name) for name in _PROXIES):
        return {}
    given = [environment.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    if any(text.strip() == "*" for text in given):  # in a list, clients do not take it for all hosts
        return {}
    excepted = [name.strip() for text in given for name in text.split(",")]
    joined = ",".join(dict.fromkeys(filter(None, (*excepted, host))))
    return {"NO_PROXY": joined, "no_proxy": joined}


def run(start: Start) -> int:
    """Returns the exit code of the first command that fails, else that of the last. The agent handles Ctrl-C."""
    environment = {name: value for name, value in os.environ.items() if name not in start.unset}
    before = signal.signal(
        signal.SIGINT, lambda number, frame: None
    )  # not SIG_IGN, which the agent would inherit
    try:
        for command in start.commands:
            code = subprocess.run(command, env=environment | start.environment, check=False).returncode
            if code:
                return code if code > 0 else 128 - code
    finally:
        signal.signal(signal.SIGINT, before)
    return 0
