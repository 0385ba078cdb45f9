"""`moeserve bench serve --against-engine FLAGS`: measures the time that a server adds to its engine's time. First the
engine without a server computes prompts and answers of the same lengths in a process of its own (`bench engine`). Then
a server with the same flags is started and measured.

The engine computes all prompts and then decodes all streams together. Its time is a lower bound: no request waits or
arrives late, and nothing is tokenised, sampled with penalties, or sent.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from moeserve.cli.bench.engine import SHARED
from moeserve.cli.command_line import flag_name, options_parser, read_options
from moeserve.cli.running_server import ANSWER_S, opener_of
from moeserve.cli.workload.report import TableRow
from moeserve.cli.workload.trace import Workload
from moeserve.config import env_name
from moeserve.errors import ConfigError
from moeserve.processes.lifecycle import python_environment

FLAG: Final = "--against-engine"
MOESERVE: Final = (sys.executable, "-P", "-m", "moeserve")
# The most decode steps that are timed; further steps of an answer count as equally long.
LONGEST_DECODE: Final = 128
READY_S: Final = 3600.0  # for a start; it ends earlier where the server does
STOP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class EngineRates:
    """The rates of the engine without a server, in tokens per second."""

    prefill: float
    decode: float  # summed over the streams
    streams: int

    def seconds_for(self, result: dict[str, Any]) -> float:
        """Returns the engine's seconds for the work that a server did: the output tokens, and the prompt tokens that
        were not cached."""
        computed = result["total_input_tokens"] - (result["total_cached_tokens"] or 0)
        return float(computed / self.prefill + result["total_output_tokens"] / self.decode)

    def summary(self, result: dict[str, Any]) -> dict[str, float]:
        """Returns the figures for --save-result."""
        seconds = self.seconds_for(result)
        return {
            "engine_prefill_throughput": self.prefill,
            "engine_decode_throughput": self.decode,
            "engine_duration": seconds,
            "engine_share": seconds / result["duration"],
        }

    def rows(self, result: dict[str, Any]) -> list[TableRow]:
        share = self.seconds_for(result) / result["duration"]
        return [
            ("Prefill (tok/s):", self.prefill),
            (f"Decode at {self.streams} (tok/s):", self.decode),
            ("Time for the same tokens (s):", self.seconds_for(result)),
            ("Its share of the server's time:", f"{share:.0%}"),
        ]


def measure_engine(flags: Sequence[str], workload: Workload, concurrency: int | None) -> EngineRates:
    """Runs `bench engine` at the workload's mean lengths. Raises ConfigError with its output if it fails."""
    turns = [turn for session in workload.sessions for turn in session.turns]
    prompt = max(1, round(sum(turn.input_len for turn in turns) / len(turns)))
    gen = max(1, round(sum(turn.output_len for turn in turns) / len(turns)))
    asked = vars(_parse(flags))
    most = read_options(asked, os.environ).max_num_seqs
    streams = min(concurrency or len(turns), len(turns), most)
    shared = [part for name in SHARED if asked[name] for part in (flag_name(name), asked[name])]
    lengths = ["--prompt", str(prompt), "--gen", str(min(gen, LONGEST_DECODE)), "--batch", str(streams)]
    command = [*MOESERVE, "bench", "engine", *shared, *lengths, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=python_environment(), check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"{FLAG}: {shlex.join(command[1:])} ended with exit code {done.returncode}; its own lines "
            "above say why"
        )
    rates = {figure["phase"]: figure["tok_s"] for figure in map(json.loads, done.stdout.splitlines())}
    return EngineRates(rates["prefill"], rates["decode"], streams)


@contextmanager
def server_of(flags: Sequence[str]) -> Iterator[str]:
    """Starts a server with these flags, yields its URL once it is ready, and stops it at the end. Its log goes to this
    process's stderr. Raises ConfigError if it ends before it is ready, or is not ready within READY_S."""
    port = _free_port()
    process = subprocess.Popen(
        [*MOESERVE, *flags, "--port", str(port)],
        stdout=sys.stderr,
        env={env_name("log_level"): "warning"}
        | python_environment(),  # without log lines of requests, which would hide the progress bar
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise ConfigError(
                    f"{FLAG}: the server ended with exit code {process.returncode}; its own lines above "
                    "say why"
                )
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{FLAG}: the server was not ready at {url} within {READY_S / 60:g} minutes; its own lines above "
                    "say why, or choose a smaller model"
                )
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def split_flags(text: str) -> list[str]:
    """Returns the flags in the text of --against-engine, split as a shell does. Raises ConfigError for an unclosed
    quote, or a flag that this command sets itself."""
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{FLAG}: {error}") from None
    asked = _parse(flags)
    if asked.port or asked.host or asked.uds:
        raise ConfigError(f"{FLAG}: the server's address is chosen here; leave --host, --port and --uds out")
    return flags


def _parse(flags: Sequence[str]) -> Any:
    return options_parser(f"moeserve bench serve {FLAG}").parse_args(list(flags))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        with opener_of(url).open(f"{url}/health", timeout=ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
