#!/usr/bin/env python3
"""Our engine beside llama.cpp on one file, in one run, taking turns.

    python -m benchmarks.compare_llama_cpp MODEL.gguf --llama-python /path/to/venv/bin/python [--threads 2] [--rounds 5]
        [--device cuda] [--clock cpu]

The other Python has llama-cpp-python (built natively, for a GPU with CUDA). llama.cpp runs twice: on the CPU with its
weight repacking (default) and without; on a GPU, all layers there and with flash attention, with one KV cache for all
streams and with one each. The better of the two counts for each figure. Everything is loaded at once and idle while
another runs; a round is ours, then llama.cpp in both forms. Ratios are of neighbours in a round; given are the median,
the least, and all. `--clock cpu` counts the processes' CPU time instead of the wall's: with `--threads 1`, on a machine
whose cores other jobs use, where two threads that wait for each other mostly measure the scheduler.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import time
from pathlib import Path

from moeserve.cli.bench.engine import EngineBench
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.worker.loading.load import load_runner

CHILD = Path(__file__).with_name("llama_cpp_child.py")
FORMS = {"cpu": ("repacked", "not-repacked"), "cuda": ("shared-cache", "own-caches")}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Ours:
    name = "moeserve"

    def __init__(
        self, model: str, threads: int, prompt: int, clock: str, streams: int, longest: int, device: str
    ) -> None:
        """streams: at most so many at once; longest: tokens of a request, at most."""
        self.prompt, self.clock = prompt, CLOCKS[clock]
        config = ServerConfig(
            model=model,
            device=device,
            threads=threads,
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


class LlamaCpp:
    def __init__(
        self, python: str, model: str, threads: int, prompt: int, clock: str, form: str, streams: int
    ) -> None:
        self.name = f"llama.cpp {form}"
        self.child = subprocess.Popen(
            [python, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.prompt = prompt
        self.load_s = self._ask(f"load {model} {threads} {form} {clock} {streams}")

    def prefill(self, tokens: int) -> float:
        return self._ask(f"prefill {tokens}")

    def decode(self, streams: int, steps: int) -> float:
        return self._ask(f"decode {streams} {self.prompt} {steps}")

    def _ask(self, command: str) -> float:
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.write(command + "\n")
        return float(json.loads(self.child.stdout.readline()))


@dataclasses.dataclass(frozen=True)
class Measure:
    name: str
    prefill: int = 0
    streams: int = 0
    steps: int = 0

    def of(self, engine: Ours | LlamaCpp) -> float:
        return engine.prefill(self.prefill) if self.prefill else engine.decode(self.streams, self.steps)


def compare(engines: list[Ours | LlamaCpp], measure: Measure, rounds: int) -> None:
    values: list[list[float]] = [[] for _ in engines]
    for turn in range(rounds + 1):
        for engine, tok_s in zip(engines, values, strict=True):
            value = measure.of(engine)
            if turn:  # the first round warms up
                tok_s.append(value)
    medians = [statistics.median(v) for v in values]
    best = max(range(1, len(engines)), key=medians.__getitem__)
    ratios = [ours / theirs for ours, theirs in zip(values[0], values[best], strict=True)]
    rounds_by_turn = " ".join(f"{ratio:.2f}" for ratio in ratios)
    figures = "  ".join(f"{e.name} {m:.1f}" for e, m in zip(engines, medians, strict=True))
    print(
        f"{measure.name:<20}{figures} tok/s; against the best {statistics.median(ratios):.2f}x, "
        f"least {min(ratios):.2f}x (rounds: {rounds_by_turn})",
        flush=True,
    )


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
    args = parser.parse_args()
    streams = [int(n) for n in args.streams.split(",") if n]
    common = args.model, args.threads, args.prompt, args.clock
    most, longest = max([8, *streams]), max(256, args.prefill, args.prompt + (args.steps or 48))
    ours = Ours(*common, most, longest, args.device)
    theirs = [LlamaCpp(args.llama_python, *common, form, most) for form in FORMS[args.device]]
    engines: list[Ours | LlamaCpp] = [ours, *theirs]
    print("load: " + ", ".join(f"{engine.name} {engine.load_s:.1f} s" for engine in engines), flush=True)
    for count in streams:
        steps = args.steps or max(8, 48 // count)
        compare(engines, Measure(f"decode, {count} streams", streams=count, steps=steps), args.rounds)
        if ours.fractions and count == 1 and args.clock == "wall":
            print(f"{'':<20}of the read bandwidth: {statistics.median(ours.fractions):.0%}", flush=True)
    if args.prefill:
        compare(engines, Measure(f"prefill, {args.prefill}", prefill=args.prefill), args.rounds)


if __name__ == "__main__":
    main()
