"""Finds the server that a command needs. If none runs at the address, the command starts one and stops it when it
ends."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, NamedTuple

from moeserve.cli.command_line import flag_name, help_of
from moeserve.cli.running_server import (
    ANSWER_S,
    ServedModel,
    ServerGone,
    models_at,
    opener_of,
    request_of,
    url_of,
)
from moeserve.config import ServerConfig
from moeserve.errors import UserError
from moeserve.hub import parse_name
from moeserve.processes.logs import set_up_logging

LOOK_S: Final = 0.3
MOST_HEALTH_BYTES: Final = 1 << 16
END_S: Final = 60.0  # time that a server may take to stop
SERVER_OPTIONS: Final = ("model", "host", "port", "api_key", "max_model_len", "ssl_certfile", "ssl_keyfile")
_FIELDS: Final = {option.name: option for option in dataclasses.fields(ServerConfig)}
# Their help where a command asks a server, and starts it only if none runs.
SERVER_TEXTS: Final = {
    name: help_of(_FIELDS[name], text)
    for name, text in {
        "host": "address of the server; one that this command starts listens there",
        "port": "TCP port of the server; one that this command starts listens there",
        "api_key": "key to send to the server; one that this command starts requires it (default: none)",
        "ssl_certfile": "ask by HTTPS, a server with this certificate (PEM); one that this command starts serves "
        "with it (default: none; HTTP)",
    }.items()
}


class FoundServer(NamedTuple):
    url: str
    model: ServedModel
    # Starts it again where it is the command's own and has ended; returns whether it runs anew. Raises UserError if it
    # does not start.
    revive: Callable[[], bool] = lambda: False


@contextmanager
def server_for(
    config: ServerConfig, given: dict[str, str | list[str] | None], *, needs_model: bool = True
) -> Iterator[FoundServer]:
    """Yields a server: one that already runs, or one that runs until the block ends. `given`: the server's flags as the
    user gave them, to start one. needs_model: if the flags name no model, start no server; False: start one with the
    demonstration model. Raises UserError if no server can be found or started, or it serves another model."""
    url, key = url_of(config), next(iter(config.api_key), None)
    try:
        model = running_model(url, key, config.model)
    except ServerGone:
        if needs_model and not config.model:
            raise
    else:
        yield FoundServer(url, model)
        return
    _download(config.model)
    if sys.stderr.isatty():
        served = config.model or "the small demonstration model, which can do a few things only"
        print(f"no server runs at {url}; starting one, for this command, with {served}", file=sys.stderr)
    with _own_server(url, given) as server:
        yield FoundServer(url, models_at(url, key)[0], server.revive)


def running_model(url: str, key: str | None, name: str, *, any_owner: bool = False) -> ServedModel:
    """Waits until a running server is ready, and returns its model. name: the model to find; "": the first. any_owner:
    as for `models_at`. Raises UserError if the server is none of ours, has another model, or wants another key."""
    _wanted(url, models_at(url, key, any_owner=any_owner), name)
    wait_until_ready(url, None)  # while it is loading, it does not know its context yet
    return _wanted(url, models_at(url, key, any_owner=any_owner), name)


def _download(model: str) -> None:
    """Downloads the model, if it is the hub's, in this process: its terminal shows the progress, the server's log would
    not. Raises UserError."""
    name = None if os.path.exists(Path(model).expanduser()) else parse_name(model)
    if name is not None:
        from moeserve.hub.download import fetch  # imports the hub's library, which is needed only here

        set_up_logging("hub", "info")
        fetch(name)


def _wanted(url: str, served: list[ServedModel], model: str) -> ServedModel:
    """Returns the model with this name or path; the first if it is "". Raises UserError if the server has no such
    model."""
    if not model:
        return served[0]
    for one in served:
        if one.name in (model, Path(model).stem):
            return one
    names = ", ".join(one.name for one in served)
    raise UserError(
        f"the server at {url} serves {names}, not {model}; leave the model out, or choose another --port"
    )


class _OwnServer:
    """A server in its own session, so that Ctrl-C does not reach it."""

    def __init__(self, url: str, command: Sequence[str], log: IO[bytes]) -> None:
        self._url, self._command, self._log = url, command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and returns when it is ready. Raises UserError with the log's last lines if it does not
        start."""
        self._log.seek(0)
        self._log.truncate()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        if not wait_until_ready(self._url, self._process):
            raise UserError(f"the server did not start:\n{_last_lines(self._log)}")

    def revive(self) -> bool:
        if self._process is None or self._process.poll() is None:
            return False
        if sys.stderr.isatty():
            print("the server has ended; starting it again", file=sys.stderr)
        self.start()
        return True

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _own_server(url: str, given: dict[str, str | list[str] | None]) -> Iterator[_OwnServer]:
    """Yields a server that is ready. It is stopped at the block's end, also if the terminal closes or SIGTERM arrives.
    Raises UserError."""
    command = [sys.executable, "-P", "-m", "moeserve", "serve"]
    for name, value in given.items():
        for text in [value] if isinstance(value, str) else value or []:
            command += [flag_name(name), text]
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _end) for number in ends}
    with tempfile.TemporaryFile(prefix="moeserve-log-") as log:
        server = _OwnServer(url, command, log)
        try:
            server.start()
            yield server
        finally:
            server.stop()
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def wait_until_ready(url: str, server: subprocess.Popen[bytes] | None) -> bool:
    """Waits until /health reports "ok", and shows the progress on a terminal. Returns False if the server is gone: the
    process `server` has ended, or, with None (a server that another process started), nothing listens at `url`."""
    told, progress = "", _Progress()
    try:
        while server is None or server.poll() is None:
            state = _health(url)
            if state.get("status") == "ok":
                return True
            if server is None and not state:
                return False
            text = f"server: {progress.text(state)}"
            if text != told:
                _show(text)
            told = text
            time.sleep(LOOK_S)
        return False
    finally:
        _show("")


class _Progress:
    """The stages of loading, and the remaining time of each, estimated from its progress so far."""

    def __init__(self) -> None:
        self._stage, self._since, self._from = "", 0.0, 0.0

    def text(self, state: dict[str, Any]) -> str:
        """Returns the progress as text. state: the state that /health reports."""
        stage, fraction = str(state.get("stage", state.get("status", "starting"))), state.get("fraction", 0)
        fraction = float(fraction) if isinstance(fraction, int | float) else 0.0
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._since, self._from = stage, now, fraction
        gained = fraction - self._from
        left = "" if gained < 0.02 else f", {(now - self._since) / gained * (1 - fraction):.0f} s left"
        return f"{stage[:30]} {100 * fraction:.0f}%{left}"


def _show(text: str) -> None:
    """Replaces the progress shown before, on a terminal."""
    if sys.stderr.isatty():
        safe = "".join(char for char in text if char.isprintable())
        print(f"\r{safe:<60}\r", end="", file=sys.stderr, flush=True)


def _health(url: str) -> dict[str, Any]:
    """Returns the answer of /health; {} while nothing listens, or if another program answers."""
    try:
        with opener_of(url).open(request_of(f"{url}/health", None), timeout=ANSWER_S) as response:
            body = response.read(MOST_HEALTH_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(MOST_HEALTH_BYTES)
    except (OSError, http.client.HTTPException):
        return {}
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "status" in found else {}


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    lines: Sequence[str] = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-5:])
