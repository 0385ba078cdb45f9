#!/usr/bin/env python3
"""Our engine beside llama.cpp on one file, in one run, taking turns.

    python -m benchmarks.compare_llama_cpp MODEL.gguf --llama-python /path/to/venv/bin/python [--threads 2] [--rounds 5]
        [--device cuda] [--clock cpu]
    python -m benchmarks.compare_llama_cpp MODEL.gguf --llama-python PYTHON --streams 1 --prefill 256
        --expert-ram 1.5 --control-group /sys/fs/cgroup/memory/NAME

The other Python has llama-cpp-python (built natively, for a GPU with CUDA). llama.cpp runs twice: on the CPU with its
weight repacking (default) and without; on a GPU, all layers there and with flash attention, with one KV cache for all
streams and with one each. The better of the two counts for each figure. Everything is loaded at once and idle while
another runs; a round is ours, then llama.cpp in both forms. Ratios are of neighbours in a round; given are the median,
the least, and all. `--clock cpu` counts the processes' CPU time instead of the wall's: with `--threads 1`, on a machine
whose cores other jobs use, where two threads that wait for each other mostly measure the scheduler.

The second form compares a model larger than RAM: ours with experts on disk, llama.cpp with the mapped file. Make the
group with a limit of memory beforehand. In each turn an engine is started in it, alone, with none of the file in the
page cache. Before decoding is measured, it decodes `--warm-up` steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moeserve.cli.bench.engine import EngineBench
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.worker.loading.load import load_runner

CHILD = Path(__file__).with_name("llama_cpp_child.py")
OUR_CHILD = Path(__file__).with_name("our_child.py")
FORMS = {"cpu": ("repacked", "not-repacked"), "cuda": ("shared-cache", "own-caches")}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Ours:
    name = "moeserve"

    def __init__(
        self,
        model: str,
        threads: int,
        prompt: int,
        clock: str,
        streams: int,
        longest: int,
        device: str,
        expert_ram: float | None = None,
    ) -> None:
        """streams: the most at once; longest: the most tokens of a request. expert_ram: in GiB; None: all
        experts are in RAM, or as many as fit."""
        self.prompt, self.clock = prompt, CLOCKS[clock]
        config = ServerConfig(
            model=model,
            device=device,
            threads=threads,
            expert_ram=expert_ram,
            max_num_seqs=streams,
            max_model_len=longest,
            max_total_tokens=streams * longest,
        )
        start = time.perf_counter()
        self.runner = load_runner(resolve(config), lambda *_: None)
        self.load_s = time.perf_counter() - start
        # Greedy streams of random weights soon repeat themselves and share experts; the tokens of the child are random.
        step_tokens = self.runner.ready().max_num_batched_tokens
        self.bench = EngineBench(self.runner, step_tokens, temperature=1.0)
        self.fractions: list[float] = []  # of the read bandwidth, of each decode with one stream on the CPU

    def prefill(self, tokens: int) -> float:
        start = self.clock()
        self.bench.prefill(1, tokens)
        return tokens / (self.clock() - start)

    def decode(self, streams: int, steps: int) -> float:
        self.bench.prefill(streams, self.prompt)
        if not self.runner.engine.counts_every_step:
            start = self.clock()
            self.bench.decode(streams, self.prompt, steps)
            return streams * steps / (self.clock() - start)
        before, read = self.bench.read_gb_s(), self.runner.engine.weight_counters()
        start = self.clock()
        self.bench.decode(streams, self.prompt, steps)
        seconds = self.clock() - start
        gb_s = self.runner.engine.weight_bytes_since(read) / seconds / 1e9
        if streams == 1:
            self.fractions.append(gb_s / statistics.mean((before, self.bench.read_gb_s())))
        return streams * steps / seconds


class Child:
    """An engine in a process of its own, under a Python of its own."""

    def __init__(
        self, name: str, command: Sequence[str | Path], prompt: int, group: Path | None = None
    ) -> None:
        """command: of the process, which answers as llama_cpp_child.py does. prompt: tokens of a stream before
        decoding. group: the control group that the process joins."""
        self.name, self.prompt = name, prompt
        join = ["bash", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "bash"] if group else []
        self.child = subprocess.Popen(
            [*join, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.load_s = 0.0

    def load(self, model: str, threads: int, form: str, clock: str, streams: int) -> None:
        self.load_s = self._ask(f"load {model} {threads} {form} {clock} {streams}")

    def prefill(self, tokens: int) -> float:
        return self._ask(f"prefill {tokens}")

    def decode(self, streams: int, steps: int) -> float:
        return self._ask(f"decode {streams} {self.prompt} {steps}")

    def end(self) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        self.child.wait()

    def _ask(self, command: str) -> float:
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.write(command + "\n")
        answer = self.child.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with {self.child.wait()} at: {command}")
        return float(json.loads(answer))


def llama_cpp(
    python: str, model: str, threads: int, prompt: int, clock: str, form: str, streams: int
) -> Child:
    """Returns llama.cpp with the model loaded."""
    child = Child(f"llama.cpp {form}", [python, CHILD], prompt)
    child.load(model, threads, form, clock, streams)
    return child


@dataclasses.dataclass(frozen=True)
class Measure:
    name: str
    prefill: int = 0
    streams: int = 0
    steps: int = 0

    def of(self, engine: Ours | Child) -> float:
        return engine.prefill(self.prefill) if self.prefill else engine.decode(self.streams, self.steps)


def compare(engines: list[Ours | Child], measure: Measure, rounds: int) -> None:
    values: list[list[float]] = [[] for _ in engines]
    for turn in range(rounds + 1):
        for engine, tok_s in zip(engines, values, strict=True):
            value = measure.of(engine)
            if turn:  # the first round warms up
                tok_s.append(value)
    report(measure.name, [engine.name for engine in engines], values)


def report(measured: str, names: list[str], values: list[list[float]]) -> None:
    """values: tokens a second of each engine, ours first, by rounds."""
    medians = [statistics.median(v) for v in values]
    best = max(range(1, len(names)), key=medians.__getitem__)
    ratios = [ours / theirs for ours, theirs in zip(values[0], values[best], strict=True)]
    rounds_by_turn = " ".join(f"{ratio:.2f}" for ratio in ratios)
    figures = "  ".join(f"{name} {m:.1f}" for name, m in zip(names, medians, strict=True))
    print(
        f"{measured:<20}{figures} tok/s; against the best {statistics.median(ratios):.2f}x, "
        f"least {min(ratios):.2f}x (rounds: {rounds_by_turn})",
        flush=True,
    )


def compare_on_disk(args: argparse.Namespace, measures: list[Measure]) -> None:
    """Starts our engine and llama.cpp's in turns, each alone in the control group."""
    streams = max([1, *(measure.streams for measure in measures)])
    engines = {
        "moeserve": ([sys.executable, OUR_CHILD], str(args.expert_ram)),
        "llama.cpp mapped": ([args.llama_python, CHILD], "not-repacked"),
    }
    values = {(name, measure.name): list[float]() for name in engines for measure in measures}
    for turn in range(args.rounds):
        for name, (command, form) in engines.items():
            forget_pages(Path(args.model))
            child = Child(name, command, args.prompt, args.control_group)
            child.load(args.model, args.threads, form, args.clock, streams)
            child.decode(1, args.warm_up)
            for measure in measures:
                values[name, measure.name].append(measure.of(child))
            child.end()
            told = ", ".join(f"{m.name} {values[name, m.name][-1]:.2f} tok/s" for m in measures)
            print(f"round {turn + 1}, {name}: loaded in {child.load_s:.1f} s; {told}", flush=True)
    for measure in measures:
        report(measure.name, list(engines), [values[name, measure.name] for name in engines])


def forget_pages(path: Path) -> None:
    """Drops the file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each stream before decoding")
    parser.add_argument("--prefill", type=int, default=512, help="0: none")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--device", choices=FORMS, default="cpu")
    parser.add_argument(
        "--steps", type=int, help="decode steps of a round; default: 48 of all streams, at least 8"
    )
    parser.add_argument(
        "--expert-ram", type=float, metavar="GIB", help="with --control-group: as the server's"
    )
    parser.add_argument("--control-group", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--warm-up", type=int, default=32, help="with --control-group: steps before the first measure"
    )
    args = parser.parse_args()
    streams = [int(n) for n in args.streams.split(",") if n]
    decodes = [
        Measure(f"decode, {n} streams", streams=n, steps=args.steps or max(8, 48 // n)) for n in streams
    ]
    prefills = [Measure(f"prefill, {args.prefill}", prefill=args.prefill)] if args.prefill else []
    if args.control_group is None:
        compare_in_ram(args, decodes, prefills)
    else:
        compare_on_disk(args, [*decodes, *prefills])


def compare_in_ram(args: argparse.Namespace, decodes: list[Measure], prefills: list[Measure]) -> None:
    """Loads all engines at once."""
    most = max([8, *(decode.streams for decode in decodes)])
    longest = max(256, args.prefill, args.prompt + (args.steps or 48))
    ours = Ours(args.model, args.threads, args.prompt, args.clock, most, longest, args.device)
    engines: list[Ours | Child] = [ours]
    common = args.threads, args.prompt, args.clock
    engines += [llama_cpp(args.llama_python, args.model, *common, form, most) for form in FORMS[args.device]]
    print("load: " + ", ".join(f"{engine.name} {engine.load_s:.1f} s" for engine in engines), flush=True)
    for decode in decodes:
        compare(engines, decode, args.rounds)
        if ours.fractions and decode.streams == 1 and args.clock == "wall":
            print(f"{'':<20}of the read bandwidth: {statistics.median(ours.fractions):.0%}", flush=True)
    for prefill in prefills:
        compare(engines, prefill, args.rounds)


if __name__ == "__main__":
    main()
