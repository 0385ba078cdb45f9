#!/usr/bin/env python3
"""How true `moeserve plan` is: its memory beside a running server's, its speed beside the engine's, in turns.

    python -m benchmarks.plan_accuracy model.gguf [--rounds 3] [--prompt 512] [--gen 16] [--batch 1,4,16]
    python -m benchmarks.plan_accuracy 30b.gguf --load-format dummy --device cuda --num-gpu-experts 64

Memory is that of all processes of a server after two prompts and answers, whose KV is counted as the plan counts it.
Beside what was predicted just before stands the worker's time of the second's steps, as /metrics has it.

Then the engine without a server. In each round the machine is measured and the speed predicted, then the engine runs;
on a shared machine the two see about the same minute. Ratios are predicted over measured, of rounds their median. With
--save the predictions' ingredients and what was measured are kept, for --fit:

    python -m benchmarks.plan_accuracy 30b.gguf … --skip-server --save runs.jsonl      # for some placements
    python -m benchmarks.plan_accuracy 30b.gguf --fit runs.jsonl                        # the constants that fit
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from benchmarks.plan_fit import print_fit
from moeserve.cli.bench.engine import SHARED, EngineBench
from moeserve.cli.command_line import flag_name, read_options, resolve
from moeserve.cli.plan.gpu_machine import measure_gpu
from moeserve.cli.plan.machine import measure
from moeserve.cli.plan.options import SHARED as PLANNED
from moeserve.cli.plan.rates import CpuRates, GpuRates
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.speed import CpuSpeed, HybridSpeed
from moeserve.config import ServerConfig
from moeserve.kv.layout import KvLayout
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_shape
from moeserve.models.tensors import check_tensors
from moeserve.placement import ModelSizes, Placement, PlacementOptions, place
from moeserve.placement.engine_memory import gpu_reserved_bytes
from moeserve.placement.sizes import has_float_weights
from moeserve.placement.step_tokens import step_tokens
from moeserve.worker.loading.device import choose_device
from moeserve.worker.loading.load import load_runner
from tests.support.servers.process_memory import memory_of
from tests.support.servers.server import REPOSITORY, Server, running_server

PREFILLS = 3  # in a round
# Of the server, beside --model.
FLAGS = (*(name for name in SHARED if name != "model"), "max_model_len", "max_num_seqs", "max_total_tokens")
Figures = dict[str, float]  # tokens a second, by name


class Accuracy:
    def __init__(self, config: ServerConfig, prompts: list[int], gen: int, batches: list[int]) -> None:
        self._prompts, self._gen, self._batches = prompts, gen, batches
        most = max(batches)
        length = max(prompts) + gen + 1
        self._config = dataclasses.replace(
            config, max_num_seqs=most, max_model_len=length, max_total_tokens=max(64, most * length)
        )
        self._gguf = open_metadata(Path(config.model))
        self._model = read_shape(self._gguf)
        check_tensors(self._model, self._gguf)
        self._layout = KvLayout(self._model)
        self._sizes = ModelSizes.of(self._gguf.tensors, self._layout)
        self._on_gpu = choose_device(config.device) == "cuda"
        self._gpu_before = gpu_used() if self._on_gpu else 0
        self._step_tokens = self._steps()
        self._placement = self._place()
        # Sampled: greedy streams of a model with random weights run into the same tokens, which ask for the same
        # experts; a plan knows nothing of that.
        self._runner = load_runner(self._config, lambda *_: None)
        self._bench = EngineBench(self._runner, self._step_tokens, temperature=1.0)
        for prompt in prompts:
            self._bench.prefill(1, prompt)  # the first touch of every buffer, and what compiles late

    def _steps(self) -> int:
        if not self._on_gpu:
            return step_tokens(self._config.max_num_batched_tokens, self._model, None)
        from moeserve.worker.loading.gpu.device_memory import (
            step_tokens_on,  # a machine without a GPU may lack Triton
        )

        return step_tokens_on(torch.device("cuda", 0), self._config, self._model)

    def _place(self) -> Placement:
        if not self._on_gpu:
            return place(self._sizes, PlacementOptions(), None)
        from moeserve.worker.loading.gpu.device_memory import plan_placement

        most = max(self._step_tokens, self._config.max_num_seqs)
        return plan_placement(self._config, self._layout, self._gguf, most, torch.device("cuda", 0))

    def _routing(self) -> RoutingProbabilities:
        """From the engine's own heat: random weights have their favourites among the experts."""
        return RoutingProbabilities(self._model, self._heat().tolist())

    def _heat(self) -> npt.NDArray[np.int64]:
        use = self._runner.expert_use()
        return np.frombuffer(use.tokens, np.int64).reshape(use.layers, use.experts)

    def rates(self) -> tuple[CpuRates, GpuRates | None]:
        cpu = measure(self._config, self._gguf, self._model)
        return cpu, measure_gpu(torch.device("cuda", 0)) if self._on_gpu else None

    def predicted(self, cpu: CpuRates, gpu: GpuRates | None) -> Figures:
        model, sizes, routing = self._model, self._sizes, self._routing()
        speed = (
            CpuSpeed(model, sizes, routing, cpu)
            if gpu is None
            else HybridSpeed(model, sizes, routing, self._placement, cpu, gpu)
        )
        figures = {f"prefill {p}": speed.prefill(p, self._step_tokens) for p in self._prompts}
        context = self._prompts[0] + self._gen // 2
        return figures | {f"decode {b}": speed.decode(b, context) for b in self._batches}

    def measured(self) -> Figures:
        """From the median of the steps: an interrupted one does not count."""
        bench = self._bench
        figures = {
            f"prefill {p}": p / _median([partial(bench.prefill, 1, p)] * PREFILLS) for p in self._prompts
        }
        prompt = self._prompts[0]
        for batch in self._batches:
            bench.prefill(batch, prompt)
            steps = [partial(bench.decode, batch, prompt + i, 1) for i in range(self._gen)]
            figures[f"decode {batch}"] = batch / _median(steps)
        return figures

    def compare(self, rounds: int) -> list[dict[str, object]]:
        """Before and after each run of the engine the machine is measured; both predictions count."""
        runs: list[tuple[Figures, Figures]] = []
        kept: list[dict[str, object]] = []
        self.measured()  # for the routing
        print(self._runner.ready().device)
        if self._on_gpu:
            self.show_memory()
        rates = self.rates()
        before = self.predicted(*rates)
        for _ in range(rounds):
            measured = self.measured()
            kept.append(self._record(rates, measured))
            rates = self.rates()
            after = self.predicted(*rates)
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
        return kept

    def show_memory(self) -> None:
        """Prints this process's memory after its largest step."""
        most = max(self._step_tokens, self._config.max_num_seqs)
        placement = self._placement
        parts = {
            "weights": placement.gpu_weight_bytes,
            "KV": (placement.kv_tokens or 0) * self._sizes.kv_bytes(),
            "streaming": placement.stream_bytes,
            "buffers": gpu_reserved_bytes(
                self._config,
                self._model,
                most,
                self._sizes,
                placement.gpu_weight_bytes,
                float_weights=has_float_weights(self._gguf.tensors, self._model),
            ),
        }
        taken = gpu_used() - self._gpu_before
        torch_s = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        print(
            f"GPU, MiB: {', '.join(f'{name} {size / 2**20:,.0f}' for name, size in parts.items())}, together "
            f"{sum(parts.values()) / 2**20:,.0f}; taken {taken / 2**20:,.0f}, by torch "
            f"{torch_s[0] / 2**20:,.0f} of {torch_s[1] / 2**20:,.0f} reserved"
        )
        ram = psutil.Process().memory_full_info()
        status = Path("/proc/self/status").read_text()
        locked = [line.split() for line in status.splitlines() if line.startswith(("VmPin", "VmLck", "Rss"))]
        print(
            f"RAM, MiB: weights {placement.cpu_weight_bytes / 2**20:,.0f}; process {ram.pss / 2**20:,.0f} (PSS), "
            f"{ram.uss / 2**20:,.0f} (USS); {locked}"
        )

    def _record(self, rates: tuple[CpuRates, GpuRates | None], measured: Figures) -> dict[str, object]:
        cpu, gpu = rates
        return {
            "model": self._config.model,
            "gpu_experts": [list(layer.gpu_experts) for layer in self._placement.layers],
            "prefill": [layer.prefill for layer in self._placement.layers],
            "cpu": dataclasses.asdict(cpu),
            "gpu": None if gpu is None else dataclasses.asdict(gpu),
            "heat": self._heat().tolist(),
            "step_tokens": self._step_tokens,
            "context": self._prompts[0] + self._gen // 2,
            "measured": measured,
        }


def _median(work: Sequence[Callable[[], object]]) -> float:
    """Seconds."""
    times: list[float] = []
    for one in work:
        start = time.perf_counter()
        one()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def gpu_used() -> int:
    """Bytes of the first GPU's memory in use, by all programs, with their CUDA contexts."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def planned(flags: dict[str, str]) -> dict[str, Any]:
    """What `moeserve plan` says. `flags` by field name; those it does not know have no say in memory or speed."""
    asked = [part for name in PLANNED if name in flags for part in (flag_name(name), flags[name])]
    command = [sys.executable, "-m", "moeserve", "plan", *asked, "--json"]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    plan: dict[str, Any] = json.loads(said.stdout)
    return plan


def compare_server(flags: dict[str, str], prompt: int, gen: int, batches: list[int]) -> None:
    """Memory, and the speed of requests."""
    plan = planned(flags)
    if unknown := {str(batch) for batch in batches} - set(plan["speed"]["decode"]):
        raise SystemExit(
            f"--batch: the plan has no {', '.join(unknown)}, but {', '.join(plan['speed']['decode'])}; or --skip-server"
        )
    on_gpu = plan["gpu_memory"] is not None
    before = gpu_used() if on_gpu else 0
    given = [part for name, value in flags.items() for part in (flag_name(name), value) if name != "model"]
    with running_server(Path(flags["model"]), *given, ready_timeout=600) as server:
        served = ServedSpeed(server, plan["model"]["vocab_size"])
        served.prefill(prompt)  # the first touch of every buffer
        predicted = {f"prefill {prompt}": plan["speed"]["prefill"][str(prompt)]}
        measured = {f"prefill {prompt}": served.prefill(prompt)}
        for batch in batches:
            predicted[f"decode {batch}"] = plan["speed"]["decode"][str(batch)]
            measured[f"decode {batch}"] = served.decode(batch, prompt, gen)
        ram, worker = memory_of(server), server.named("worker").memory_full_info().pss
        gpu = gpu_used() - before if on_gpu else 0
    memory = plan["memory"]
    kv = served.tokens * memory["ram_kv"] // memory["kv_tokens"]
    _show("RAM, MiB", (memory["ram_start"] + kv) / 2**20, ram / 2**20)
    print(
        f"of it in the worker {worker / 2**20:,.0f} MiB (PSS); weights {memory['ram_weights'] / 2**20:,.0f} MiB"
    )
    if on_gpu:
        _show("GPU, MiB", memory["gpu"] / 2**20, gpu / 2**20)
    for name, rate in predicted.items():
        _show(f"server, {name}", rate, measured[name])


def _show(name: str, predicted: float, measured: float) -> None:
    print(f"{name}: predicted {predicted:,.1f}, measured {measured:,.1f}, ratio {predicted / measured:.3f}")


class ServedSpeed:
    """Tokens a second of a server's worker, as /metrics has its steps. Every prompt is new."""

    def __init__(self, server: Server, vocab: int) -> None:
        self._server = server
        self._vocab = vocab
        self._random = np.random.default_rng(1)
        self.tokens = 0  # computed, whose KV is there

    def prefill(self, prompt: int) -> float:
        seconds, _ = self._step_seconds("prefill", [self._body(prompt, 2)])
        return prompt / seconds

    def decode(self, streams: int, prompt: int, gen: int) -> float:
        """The prompts are computed before and come from the cache, so that nearly every step has all streams."""
        bodies = [self._body(prompt, gen) for _ in range(streams)]
        for body in bodies:
            self._server.post("/v1/completions", body | {"max_tokens": 1}, timeout=600)
        seconds, steps = self._step_seconds("decode", bodies)
        return streams * steps / seconds

    def _body(self, prompt: int, gen: int) -> dict[str, Any]:
        self.tokens += prompt + gen
        tokens = self._random.integers(0, self._vocab, prompt).tolist()
        return {
            "prompt": tokens,
            "max_tokens": gen,
            "ignore_eos": True,
            "temperature": 1,
            "seed": self.tokens,
        }

    def _step_seconds(self, phase: str, bodies: list[dict[str, Any]]) -> tuple[float, float]:
        """Seconds that all steps of a kind take while these requests are answered at once, and the number of the
        steps."""
        name = f"moeserve:{phase}_step_seconds"
        before = self._server.metrics()
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(lambda body: self._server.post("/v1/completions", body, timeout=600), bodies))
        after = self._server.metrics()
        return after[f"{name}_sum"] - before[f"{name}_sum"], after[f"{name}_count"] - before[f"{name}_count"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", default="512")
    parser.add_argument("--gen", type=int, default=16)
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--skip-server", action="store_true")
    parser.add_argument("--skip-engine", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE", help="JSON lines, appended to")
    parser.add_argument(
        "--fit", type=Path, metavar="FILE", help="fit the plan's constants to a --save file, measure nothing"
    )
    for name in FLAGS:
        parser.add_argument(flag_name(name))
    args = parser.parse_args()
    if args.fit is not None:
        print_fit(args.fit, Path(args.model))
        return
    flags = {"model": args.model}
    flags |= {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    prompts, batches = ([int(one) for one in text.split(",")] for text in (args.prompt, args.batch))
    print(" ".join(flags.values()))
    if not args.skip_server:
        compare_server(flags, prompts[0], 4 * args.gen, batches)
    if not args.skip_engine:
        config = resolve(read_options(flags, os.environ))
        records = Accuracy(config, prompts, args.gen, batches).compare(args.rounds)
        if args.save is not None:
            with args.save.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
