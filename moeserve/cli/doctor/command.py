"""`moeserve doctor`: the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from moeserve.cli.command_line import add_shared_options, read_options
from moeserve.cli.doctor.finding import Finding, as_json, as_text, has_errors
from moeserve.config import ServerConfig
from moeserve.errors import UserError

_SHARED: Final = ("host", "port", "uds", "api_key", "ssl_certfile")


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve doctor",
        description="Check whether this machine can serve: CPU, memory, limits, the API's port, the disk for "
        "downloads, the C++ extension, GPU, driver and Triton. Each line begins with ok, warning (a "
        "server runs, but more slowly or with less) or error (no server can run), and names the finding "
        "and its remedy. Exit code 0 if no line is an error, else 1.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_shared_options(parser, _SHARED)
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if a server can start here, 1 if it cannot, 2 for bad arguments."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        config = read_options({name: getattr(args, name) for name in _SHARED}, os.environ)
    except UserError as error:
        parser.error(str(error))
    findings: list[Finding] = []
    for found in _checks(config):
        findings.append(found)
        if not args.json:
            print(as_text([found]), flush=True)  # the next check may take long
    if args.json:
        print(as_json(findings))
    return 1 if has_errors(findings) else 0


def _checks(config: ServerConfig) -> Iterator[Finding]:
    from moeserve.cli.doctor import machine
    from moeserve.cli.doctor.probes import run_probe

    checks: tuple[Callable[[], Finding | Iterable[Finding]], ...] = (
        machine.check_cores,
        machine.check_memory,
        machine.check_huge_pages,
        machine.check_limits,
        lambda: machine.check_port(config),
        machine.check_disk,
        lambda: run_probe("extension"),
        lambda: run_probe("gpu"),
    )
    for check in checks:
        found = check()
        yield from [found] if isinstance(found, Finding) else found
