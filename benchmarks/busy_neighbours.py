"""Decode beside other programs: engines in turn while nothing, a steady process on each core, or a compiler runs.

    python -m benchmarks.busy_neighbours --model model.gguf [--base ../before] [--llama-python venv/bin/python]
        [--loads none,steady,apart,compiler] [--threads 2] [--batch 1] [--rounds 10]

Each engine is loaded in a process of its own and waits. While a load runs, all decode the same number of tokens in
turn, the order reversed every other round.

    none            nothing else
    steady          a process that only computes bound to each CPU, all of one session, as those of a shell are
    apart           the same, each a session of its own
    half            such a process on the first CPU only
    compiler        one g++ after another: programs that start and stop
    streaming       a process on each CPU that copies memory, which takes bandwidth besides time
    busy:N          N processes that only compute, bound to no CPU, of one session
    busy-apart:N    the same, each a session of its own

Linux divides a core among sessions (`/proc/sys/kernel/sched_autogroup_enabled`), and a session's part among the cores
that it uses. Ours uses all of them: of two cores `steady` leaves it half of each, `apart` a third.

Printed for each load and engine: median tokens a second, their share of the same engine's without any load, and the
median of the ratios ours over the engine's, round by round, with the least.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.compare_llama_cpp import Child, llama_cpp
from benchmarks.paired import Engine

PROMPT = 64  # tokens of each stream before decoding, as in the other engine's child

_COMPUTE = "while True: sum(range(10000))"
_COPY = """
import numpy
source, target = numpy.ones(1 << 25), numpy.empty(1 << 25)
while True:
    target[:] = source
"""
_SOURCE = """
#include <algorithm>
#include <map>
#include <regex>
#include <string>
#include <vector>
template <int N> struct Sum {
  static int of(const std::vector<int>& v) { return v[N % v.size()] + Sum<N - 1>::of(v); }
};
template <> struct Sum<0> { static int of(const std::vector<int>&) { return 0; } };
int main(int argc, char** argv) {
  std::map<std::string, std::vector<int>> words;
  for (int i = 0; i < argc; ++i) words[argv[i]].push_back(i);
  std::regex pattern("a+b*");
  int found = 0;
  for (auto& [word, places] : words) found += std::regex_match(word, pattern) + Sum<300>::of(places);
  return found;
}
"""


def _session(*commands: Sequence[str]) -> subprocess.Popen[bytes]:
    """Programs that start together, of one session and one process group."""
    shell = " & ".join(shlex.join(command) for command in commands)
    return subprocess.Popen(["sh", "-c", f"{shell} & wait"], start_new_session=True)


def _python(program: str, cpus: Sequence[int | None]) -> list[list[str]]:
    """A command for each CPU; None: bound to none."""
    bound = [[] if cpu is None else ["taskset", "-c", str(cpu)] for cpu in cpus]
    return [[*prefix, sys.executable, "-c", program] for prefix in bound]


@contextlib.contextmanager
def neighbours(load: str) -> Iterator[None]:
    """While open, the load runs. ValueError for a name that is none."""
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.cpp"
        source.write_text(_SOURCE)
        compiling = f"while g++ -std=c++17 -O2 -c {source} -o {source}.o; do :; done"
        sessions: dict[str, list[list[list[str]]]] = {
            "none": [],
            "half": [_python(_COMPUTE, cpus[:1])],
            "steady": [_python(_COMPUTE, cpus)],
            "apart": [[command] for command in _python(_COMPUTE, cpus)],
            "streaming": [_python(_COPY, cpus)],
            "compiler": [[["sh", "-c", compiling]]],
        }
        kind, _, count = load.partition(":")
        if kind in ("busy", "busy-apart") and count.isdecimal():
            commands = _python(_COMPUTE, [None] * int(count))
            sessions[load] = [commands] if kind == "busy" else [[command] for command in commands]
        if load not in sessions:
            raise ValueError(f"no load {load!r}, but: {', '.join(sessions)}, busy:N, busy-apart:N")
        processes = [_session(*commands) for commands in sessions[load]]
        try:
            yield
        finally:
            for process in processes:
                os.killpg(process.pid, 9)
                process.wait()


class Ours:
    def __init__(self, name: str, checkout: Path, arguments: list[str]) -> None:
        self.name = name
        self._engine = Engine(checkout.resolve(), sys.executable, arguments)

    def decode(self, streams: int, steps: int) -> float:
        self._engine.seconds(f"prefill {streams} {PROMPT}")
        return streams * steps / self._engine.seconds(f"decode {streams} {PROMPT} {steps}")


def measure(engines: list[Ours | Child], streams: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each engine, round by round; one round before does not count."""
    speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for number in range(rounds + 1):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            speed = engine.decode(streams, steps)
            if number:
                speeds[engine.name].append(speed)
    return speeds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.busy_neighbours", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="PATH")
    parser.add_argument("--base", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp without its weight repacking")
    parser.add_argument("--loads", default="none,steady,apart,compiler", metavar="NAME,NAME")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="streams (default: 1)")
    parser.add_argument("--gen", type=int, default=24, metavar="N", help="steps of a turn (default: 24)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each (default: 10)")
    args, engine_arguments = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with us
    model = str(args.model.resolve())
    shared = ["--model", model, "--threads", str(args.threads), "--batch", str(args.batch)]
    shared += ["--prompt", str(PROMPT), "--gen", str(args.gen), *engine_arguments]
    engines: list[Ours | Child] = [Ours("ours", Path(), shared)]
    if args.base is not None:
        engines.append(Ours("base", args.base, shared))
    if args.llama_python is not None:
        form = "not-repacked" if args.no_repack else "repacked"
        engines.append(llama_cpp(args.llama_python, model, args.threads, PROMPT, "wall", form, args.batch))
    alone: dict[str, float] = {}
    print(f"{'load':<12}{'engine':<22}{'tok/s':>8}{'of alone':>10}{'ours over it':>14}{'least':>8}")
    for load in args.loads.split(","):
        with neighbours(load):
            speeds = measure(engines, args.batch, args.gen, args.rounds)
        for name, values in speeds.items():
            median = statistics.median(values)
            if load == "none":
                alone[name] = median
            share = f"{median / alone[name]:.0%}" if name in alone else ""
            ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], values, strict=True)]
            compared = f"{statistics.median(ratios):>14.2f}{min(ratios):>8.2f}" if name != "ours" else ""
            print(f"{load:<12}{name:<22}{median:>8.1f}{share:>10}{compared}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
