#!/usr/bin/env python3
"""How true `moeserve plan` is: its memory beside a running server's, its speed beside the engine's, in turns.

    python -m benchmarks.plan_accuracy model.gguf [--rounds 3] [--prompt 512] [--gen 16] [--batch 1,4,16]

Memory is that of all processes of a server after two prompts and answers, whose KV is counted as the plan counts it.
Beside what was predicted just before stands the worker's time of the second's steps, as /metrics has it.

Then the engine without a server. In each round the machine is measured and the speed predicted, then the engine runs;
on a shared machine the two see about the same minute. Ratios are predicted over measured, of rounds their median.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.server import Server, running_server
from moeserve.bench.engine import EngineBench
from moeserve.config import ServerConfig
from moeserve.models.gguf import open_gguf
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.options import resolve
from moeserve.placement import ModelSizes, Wishes, place
from moeserve.plan.machine import measure
from moeserve.plan.memory import predict
from moeserve.plan.routing import Routing
from moeserve.plan.speed import CpuSpeed
from moeserve.worker.loading import load_runner

PREFILLS = 3  # in a round
Figures = dict[str, float]  # tokens a second, by name


class Accuracy:
    def __init__(self, path: Path, prompt: int, gen: int, batches: list[int]) -> None:
        self._prompt, self._gen, self._batches = prompt, gen, batches
        most = max(batches)
        length = prompt + gen + 1
        self._config = dataclasses.replace(
            resolve(ServerConfig(model=str(path))),
            max_num_seqs=most,
            max_model_len=length,
            max_total_tokens=max(64, most * length),
        )
        self._gguf = open_gguf(path)
        self._model = Qwen3MoeConfig.from_gguf(self._gguf)
        self._model.check_tensors(self._gguf)
        self._sizes = ModelSizes.of(self._gguf.tensors, self._model)
        # Sampled: greedy streams of a model with random weights run into the same tokens, which ask for the same
        # experts; a plan knows nothing of that.
        self._runner = load_runner(self._config, lambda *_: None)
        self._bench = EngineBench(self._runner, self._config.max_num_batched_tokens, temperature=1.0)
        self._bench.prefill(1, 32)  # the first touch of every buffer

    def _routing(self) -> Routing:
        """From the engine's own heat: random weights have their favourites among the experts."""
        use = self._runner.expert_use()
        counts = np.frombuffer(use.tokens, np.int64).reshape(use.layers, use.experts)
        return Routing(self._model, counts.tolist())

    def predicted(self) -> Figures:
        rates = measure(self._config, self._gguf, self._model)
        speed = CpuSpeed(self._model, self._sizes, self._routing(), rates)
        figures = {
            f"prefill {self._prompt}": speed.prefill(self._prompt, self._config.max_num_batched_tokens)
        }
        return figures | {
            f"decode {b}": speed.decode(b, self._prompt + self._gen // 2) for b in self._batches
        }

    def measured(self) -> Figures:
        """From the median of the steps: an interrupted one does not count."""
        prompt, bench = self._prompt, self._bench
        figures = {f"prefill {prompt}": prompt / _median([partial(bench.prefill, 1, prompt)] * PREFILLS)}
        for batch in self._batches:
            bench.prefill(batch, prompt)
            steps = [partial(bench.decode, batch, prompt + i, 1) for i in range(self._gen)]
            figures[f"decode {batch}"] = batch / _median(steps)
        return figures

    def compare(self, rounds: int) -> None:
        """Before and after each run of the engine the machine is measured; both predictions count."""
        runs: list[tuple[Figures, Figures]] = []
        self.measured()  # for the routing
        before = self.predicted()
        for _ in range(rounds):
            measured = self.measured()
            after = self.predicted()
            runs.append(({name: (before[name] + after[name]) / 2 for name in before}, measured))
            before = after
        print(f"{'':<14}{'predicted':>12}{'measured':>12}{'ratio':>8}   rounds")
        for name in runs[0][0]:
            ratios = [predicted[name] / measured[name] for predicted, measured in runs]
            middle = [statistics.median(side[name] for side in sides) for sides in zip(*runs, strict=True)]
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{name:<14}{middle[0]:>12.1f}{middle[1]:>12.1f}{statistics.median(ratios):>8.2f}   {shown}"
            )


def _median(work: Sequence[Callable[[], None]]) -> float:
    """Seconds."""
    times: list[float] = []
    for one in work:
        start = time.perf_counter()
        one()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory_of(server: Server) -> int:
    """Bytes of all processes as if nothing else ran: PSS, but a library's pages count whole although other programs on
    this machine may share them."""
    private = 0
    files: dict[str, int] = {}  # the most that one process has of each
    for process in server.processes():
        for area in process.memory_maps(grouped=True):
            private += area.anonymous
            if area.path.startswith("/"):
                files[area.path] = max(files.get(area.path, 0), area.rss - area.anonymous)
    return private + sum(files.values())


def compare_server(path: Path, prompt: int, gen: int) -> None:
    """Memory, and one request's speed."""
    config = resolve(ServerConfig(model=str(path)))
    gguf = open_gguf(path)
    model = Qwen3MoeConfig.from_gguf(gguf)
    sizes = ModelSizes.of(gguf.tensors, model)
    placement = place(sizes, Wishes(), None)
    memory = predict(config, model, sizes, placement, psutil.virtual_memory().available, 0)
    random = np.random.default_rng(1)
    body = {"max_tokens": gen, "ignore_eos": True, "temperature": 1, "seed": 1}
    with running_server(path, ready_timeout=600) as server:
        server.post("/v1/completions", body | {"prompt": [1] * prompt})  # the first touch of every buffer
        tokens = random.integers(0, model.vocab_size, prompt).tolist()
        speed = CpuSpeed(model, sizes, Routing(model), measure(config, gguf, model))
        before = server.metrics()
        server.post("/v1/completions", body | {"prompt": tokens})
        after = server.metrics()
        measured = memory_of(server)
    kv = 2 * (prompt + gen) * sizes.kv_bytes * model.num_layers
    predicted = memory.ram_start + kv
    print(
        f"memory: predicted {predicted / 2**20:,.0f} MiB, measured {measured / 2**20:,.0f} MiB, "
        f"ratio {predicted / measured:.3f} (KV of {2 * (prompt + gen):,} tokens included)"
    )
    for phase, count, rate in (
        ("prefill", prompt, speed.prefill(prompt, config.max_num_batched_tokens)),
        ("decode", gen - 1, speed.decode(1, prompt + gen // 2)),
    ):
        name = f"moeserve:{phase}_step_seconds_sum"
        shown = count / (after[name] - before[name])
        print(f"server, {phase}: predicted {rate:,.1f}, measured {shown:,.1f}, ratio {rate / shown:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=16)
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--skip-server", action="store_true")
    parser.add_argument("--skip-engine", action="store_true")
    args = parser.parse_args()
    print(args.model.name)
    if not args.skip_server:
        compare_server(args.model, args.prompt, 4 * args.gen)
    if not args.skip_engine:
        batches = [int(batch) for batch in args.batch.split(",")]
        Accuracy(args.model, args.prompt, args.gen, batches).compare(args.rounds)


if __name__ == "__main__":
    main()
