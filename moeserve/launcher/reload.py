"""`moeserve reload`: makes a running server start its successor and hand over to it (`succession.py`)."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from moeserve.launcher.runtime_directory import PREFIX, places
from moeserve.launcher.succession import CONTROL

LOOK_S = 1.0  # interval between checks whether the server still runs


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve reload",
        description="Upgrade without downtime: start the installed version beside the running server, on the same "
        "sockets, and end the old server when its requests have ended. Exit code 0 when the new server is ready; 1 if "
        "it could not start, and then the old one continues.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--pid",
        type=int,
        metavar="PID",
        help="process id of the launcher of the server to upgrade; required if several servers run (default: the only "
        "one)",
    )
    return parser


def main(arguments: list[str]) -> int:
    asked = command_parser().parse_args(arguments)
    found = [path for path in controls() if asked.pid is None or path.name == f"{CONTROL}{asked.pid}"]
    if len(found) != 1:
        pids = ", ".join(path.name.removeprefix(CONTROL) for path in found)
        which = (
            f"there are several servers: choose one with --pid, {pids}"
            if found
            else "there is no such server"
        )
        print(f"moeserve reload: {which}", file=sys.stderr)
        return 1
    answer = ask(found[0])
    name, _, value = answer.partition("=")
    if name == "READY":
        print(f"the next server serves, process {value}")
        return 0
    print(f"moeserve reload: {_FAILURES[name].format(value)}", file=sys.stderr)
    return 1


_FAILURES = {
    "FAILED": "the next server ended with exit code {}, see the log; the one before goes on",
    "REFUSED": "{}",
    "GONE": "the server has ended",
}


def controls() -> list[Path]:
    """Returns the control sockets of this user's running servers."""
    candidates = {path for base in places() for path in Path(base).glob(f"{PREFIX}*/{CONTROL}*")}
    return sorted(path for path in candidates if _is_heard(path))


def _is_heard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        return sender.connect_ex(str(path)) == 0


def ask(control: Path) -> str:
    """Asks a server to upgrade. Returns its answer, sent when the successor is ready or has failed; GONE if the
    server ends first."""
    reply = control.with_name(f"reload.{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(reply))
        receiver.settimeout(LOOK_S)
        try:
            receiver.sendto(f"RELOAD={reply.name}".encode(), str(control))
            while True:
                try:
                    return receiver.recv(4096).decode()
                except TimeoutError:
                    if not _is_heard(control):
                        return "GONE"
        finally:
            reply.unlink(missing_ok=True)
