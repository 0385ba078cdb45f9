"""A server that a command needs: the one that runs at its address, else one that runs as long as the command does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Final

from moeserve.cli.command_line import flag_name
from moeserve.cli.running_server import (
    ANSWER_S,
    DIRECT,
    ServedModel,
    ServerGone,
    models_at,
    request_of,
    url_of,
)
from moeserve.config import ServerConfig
from moeserve.errors import UserError

LOOK_S: Final = 0.3
END_S: Final = 60.0  # within which a server that is told to stop has ended
SERVER_OPTIONS: Final = ("model", "host", "port", "api_key", "max_model_len", "ssl_certfile", "ssl_keyfile")


@contextmanager
def server_for(
    config: ServerConfig, given: dict[str, str | list[str] | None]
) -> Iterator[tuple[str, ServedModel]]:
    """The address of a server, and its model. `given`: the flags of SERVER_OPTIONS as they were given, for a server
    that has to be started. Raises UserError."""
    url, key = url_of(config), next(iter(config.api_key), None)
    try:
        served = _wanted(url, models_at(url, key), config.model)
    except ServerGone:
        if not config.model:
            raise
    else:
        # It may be loading still.
        ready = wait_until_ready(url, key, None)
        yield url, served if ready is None else served._replace(context_length=ready.context_length)
        return
    with _started(given) as (server, log):
        ready = wait_until_ready(url, key, server)
        if ready is None:
            raise UserError(f"the server did not start:\n{_last_lines(log)}")
        yield url, ready


def _wanted(url: str, served: list[ServedModel], model: str) -> ServedModel:
    """The model of that name or path; the first where it is "". Raises UserError."""
    if not model:
        return served[0]
    for one in served:
        if one.name in (model, Path(model).stem):
            return one
    names = ", ".join(one.name for one in served)
    raise UserError(
        f"the server at {url} serves {names}, not {model}; leave --model out, or choose another --port"
    )


@contextmanager
def _started(given: dict[str, str | list[str] | None]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A server in a session of its own, which Ctrl-C does not reach. It ends with the block, also where the terminal
    goes or SIGTERM comes."""
    command = [sys.executable, "-m", "moeserve", "serve"]
    for name, value in given.items():
        for text in [value] if isinstance(value, str) else value or []:
            command += [flag_name(name), text]
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _end) for number in ends}
    with tempfile.TemporaryFile(prefix="moeserve-log-") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield server, log
        finally:
            server.terminate()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def wait_until_ready(url: str, key: str | None, server: subprocess.Popen[bytes] | None) -> ServedModel | None:
    """The served model once the server answers questions; None where `server`, a process of ours, has ended. Raises
    UserError where another's has."""
    told = ""
    while server is None or server.poll() is None:
        state = _health(url)
        if state.get("status") == "ok" or (server is None and not state):
            _show("")
            return models_at(url, key)[0]
        text = f"server: {state.get('stage', 'starting')} {100 * float(state.get('fraction', 0)):.0f}%"
        if text != told:
            _show(text)
        told = text
        time.sleep(LOOK_S)
    _show("")
    return None


def _show(text: str) -> None:
    """In place of what was shown before, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def _health(url: str) -> dict[str, str]:
    """What /health says; {} while nothing listens."""
    try:
        with DIRECT.open(request_of(f"{url}/health", None), timeout=ANSWER_S) as response:
            found = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            found = json.loads(error.read())
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _last_lines(log: IO[bytes], count: int = 5) -> str:
    log.seek(0)
    lines: Sequence[str] = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-count:])
