#!/usr/bin/env python3
"""How true `moeserve plan` is: its memory beside a running server's, its speed beside the engine's, in turns.

    python -m benchmarks.plan_accuracy model.gguf [--rounds 3] [--prompt 512] [--gen 16] [--batch 1,4,16]

In each round the machine is measured and the speed predicted, then the engine runs; on a shared machine the two see
about the same minute. The ratio is predicted over measured, the median of the rounds. Memory is the PSS of all
processes after a prompt and an answer, whose KV is counted as the plan counts it.
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


def pss(server: Server) -> int:
    return sum(process.memory_full_info().pss for process in server.processes())


def compare_memory(path: Path, prompt: int) -> None:
    config = resolve(ServerConfig(model=str(path)))
    gguf = open_gguf(path)
    model = Qwen3MoeConfig.from_gguf(gguf)
    sizes = ModelSizes.of(gguf.tensors, model)
    placement = place(sizes, Wishes(), None)
    memory = predict(config, model, sizes, placement, psutil.virtual_memory().available, 0)
    with running_server(path, ready_timeout=600) as server:
        body = {"prompt": [1] * prompt, "max_tokens": 16, "ignore_eos": True}
        usage = server.post("/v1/completions", body)["usage"]
        measured = pss(server)
    kv = usage["total_tokens"] * sizes.kv_bytes * model.num_layers
    predicted = memory.ram_start + kv
    print(
        f"memory: predicted {predicted / 2**20:,.0f} MiB, measured {measured / 2**20:,.0f} MiB, "
        f"ratio {predicted / measured:.3f} (KV of {usage['total_tokens']:,} tokens included)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=16)
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    args = parser.parse_args()
    print(args.model.name)
    if not args.skip_memory:
        compare_memory(args.model, min(args.prompt * 2, 1000))
    if not args.skip_speed:
        batches = [int(batch) for batch in args.batch.split(",")]
        Accuracy(args.model, args.prompt, args.gen, batches).compare(args.rounds)


if __name__ == "__main__":
    main()
