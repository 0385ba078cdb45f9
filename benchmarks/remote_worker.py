"""Tokens a second with a worker behind a slow network, beside a local one.

    python -m benchmarks.remote_worker [--model FILE] [--delays 0.2,2] [--streams 1,8,16] [--layers 12] [FLAGS]

Everything runs on this machine, a proxy in a process of its own adds the delay to each way, and both servers wait while
the other works: local remote remote local, so that what else the machine does meets both alike. Link, gate and proxy
take their time from the cores that compute, which they do not where the worker is alone on its machine.

FLAGS are the engines', such as --device cuda. Without --model: a file of Qwen3-30B-A3B's shape with so many layers and
random weights. Printed for each number of streams and each delay (milliseconds each way): the medians, and the median
of the ratios pair by pair with its 90% interval by bootstrap; and how many milliseconds the worker waited for a plan
between two steps, local and remote, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from tests.support.clients.streams import Answer, ask, client, prompt_ids
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.servers.server import REPOSITORY, Server, running_server
from tests.support.servers.worker_host import link_flags, make_certificates, running_worker

PROMPT = 16  # tokens
ENGINE = ("--max-model-len", "2048", "--max-total-tokens", "16384")
READY_S = 300.0


class Proxy:
    """`tests.support.faults.delay_proxy` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders = process.stdin
        self.port = int(process.stdout.readline())

    def set_delay(self, ms: float) -> None:
        self._orders.write(f"{ms}\n")
        self._orders.flush()


@contextmanager
def running_proxy(port: int) -> Iterator[Proxy]:
    command = [sys.executable, "-m", "tests.support.faults.delay_proxy", f"127.0.0.1:{port}", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        yield Proxy(process)
        process.kill()


async def speed(server: Server, streams: int, tokens: int, seed: int) -> float:
    """Tokens a second of all streams together, while all of them run."""
    async with client(server) as connection:
        asked = (
            ask(connection, prompt_ids(PROMPT, seed + i), max_tokens=tokens, ignore_eos=True)
            for i in range(streams)
        )
        answers: list[Answer] = list(await asyncio.gather(*asked))
    start = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    return sum(answer.speed(start, end) for answer in answers)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 90% interval of the median, by bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.05, 0.95))
    return float(low), float(high)


def idle(server: Server) -> tuple[float, float]:
    """Seconds that the worker has waited between steps so far, and their number."""
    metrics = server.metrics()
    return metrics["moeserve:worker_idle_seconds_sum"], metrics["moeserve:worker_idle_seconds_count"]


def compare(local: Server, remote: Server, streams: int, tokens: int, rounds: int) -> str:
    pairs = []
    before = {server: idle(server) for server in (local, remote)}
    for turn in range(rounds):
        order = (local, remote) if turn % 2 == 0 else (remote, local)
        speeds = {server: asyncio.run(speed(server, streams, tokens, 100 * turn)) for server in order}
        pairs.append((speeds[local], speeds[remote]))
    ratios = [there / here for here, there in pairs]
    low, high = interval(ratios)
    here, there = (float(np.median(column)) for column in zip(*pairs, strict=True))
    waits = ""
    for server in (local, remote):
        seconds, steps = (after - start for after, start in zip(idle(server), before[server], strict=True))
        waits += f" {seconds / steps * 1e3:8.2f}"
    return f"{here:9.1f} {there:9.1f} {np.median(ratios):9.3f} {low:8.3f}..{high:.3f} {waits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--delays", default="0.2,2", help="milliseconds each way, after commas")
    parser.add_argument("--streams", default="1,8,16", help="how many at once, after commas")
    parser.add_argument("--layers", type=int, default=12, help="of the file that is made where none is named")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of measurements")
    args, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the servers end with us
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, engine = args.model, [*ENGINE, *flags]
        if model is None:
            model = folder / "model.gguf"
            write_header(model, qwen3moe(num_layers=args.layers))
            engine += ["--load-format", "dummy"]
        certificates = make_certificates(folder / "certificates")
        host = stack.enter_context(running_worker(model, certificates, *engine, ready_timeout=READY_S))
        proxy = stack.enter_context(running_proxy(host.port))
        link = link_flags(certificates, proxy.port)
        remote = stack.enter_context(running_server(model, *link, ready_timeout=READY_S))
        local = stack.enter_context(running_server(model, *engine, ready_timeout=READY_S))
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(
            f"{'streams':>7} {'delay':>6} {'local':>9} {'remote':>9} {'ratio':>9} {'90%':>15} {'wait':>10} {'wait':>8}"
        )
        for streams in map(int, args.streams.split(",")):
            for delay in map(float, args.delays.split(",")):
                proxy.set_delay(delay)
                line = compare(local, remote, streams, args.tokens, args.rounds)
                print(f"{streams:7} {delay:6.1f} {line}", flush=True)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
