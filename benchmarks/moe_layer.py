#!/usr/bin/env python3
"""One MoE layer of the Qwen3-30B-A3B shape, ours beside kt-kernel's GGUF path where that is installed.

    python benchmarks/moe_layer.py [--threads 1,2] [--tokens 1,2,4,8,16,64,512] [--isa …] [--kt]

128 experts, top 8, hidden 2048, width 768, Q4_K gate and up, Q6_K down, from the same bytes. The ids rotate so that
a call's experts are not in cache; eight calls follow one another as the layers of a step do. The tokens of a call ask
for different experts while there are any left, or, with --shared, all for the same eight.

Each engine is a process of its own, stopped while the other runs (kt-kernel's queue thread spins for ever, which would
take a core from ours); they take turns, and the speed-up is the median of the ratios of neighbours. GB/s counts the
bytes of the distinct experts of a call; GOPS counts 6 * hidden * width a token and expert.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.stream_operands import Activations, RoutingWorkspace
from moeserve.quantization import QuantType
from moeserve.quantization.table import Q4_K, Q6_K
from moeserve.worker.loading.cpu.thread_placement import place_threads

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
CALLS = 8  # in one measurement
OPS = 6 * HIDDEN * WIDTH * TOP_K  # a token
EXPERT_BYTES = 2 * WIDTH * Q4_K.row_bytes(HIDDEN) + HIDDEN * Q6_K.row_bytes(WIDTH)


def random_blocks(rng: np.random.Generator, kind: QuantType, rows: int, cols: int) -> np.ndarray:
    """Random codes with small finite scales: uint8 [EXPERTS * rows, row bytes]."""
    layout = kind.layout
    assert layout is not None
    shape = (EXPERTS * rows * cols // kind.block_columns, kind.block_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for half in range(layout.halves):
        at = layout.halves_at + 2 * half
        values = rng.uniform(1e-4, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = values[:, None].view(np.uint8)
    return blocks.reshape(EXPERTS * rows, -1)


class Ours:
    def __init__(self, weights: list[np.ndarray], threads: int, isa: str, tokens: int) -> None:
        self.stream = CpuStream(place_threads(threads, None, "auto"), isa)
        self.gate, self.up = (self._pack(w, Q4_K, WIDTH, HIDDEN) for w in weights[:2])
        self.down = self._pack(weights[2], Q6_K, HIDDEN, WIDTH)
        self.y = Activations(tokens, HIDDEN)
        self.h = Activations(tokens * TOP_K, WIDTH, f32=False)
        self.workspaces = [RoutingWorkspace(tokens, EXPERTS, TOP_K) for _ in range(CALLS)]
        self.ones = torch.ones(HIDDEN)
        self.expert_token_counts = torch.zeros(2, EXPERTS, dtype=torch.int64)
        self.name = f"moeserve ({self.stream.isa})"

    def _pack(self, data: np.ndarray, kind: QuantType, rows: int, cols: int) -> Matrix:
        return self.stream.pack(data, int(kind), (EXPERTS, rows, cols))

    def call(self, calls: list[torch.Tensor], weights: torch.Tensor, x: torch.Tensor) -> Callable[[], None]:
        """Quantising the input is part of a call, as it is of the rival's."""
        n = len(x)
        out = torch.zeros(n, HIDDEN)
        for workspace, ids in zip(self.workspaces, calls, strict=True):
            workspace.ids[:n], workspace.weights[:n] = ids, weights

        def run() -> None:
            for workspace in self.workspaces:
                self.stream.norm(x, self.ones, 1e-6, n, self.y)
                self.stream.experts(
                    self.gate, self.up, self.down, self.y, n, workspace, self.h, self.expert_token_counts, out
                )
            self.stream.wait()

        return run

    def read_gb_s(self) -> float:
        start = time.perf_counter()
        for matrix in (self.gate, self.up, self.down):
            self.stream.read(matrix)
        self.stream.wait()
        return EXPERTS * EXPERT_BYTES / (time.perf_counter() - start) / 1e9


class KtKernel:
    """kt-kernel's llama.cpp-based MoE over GGUF bytes."""

    def __init__(self, weights: list[np.ndarray], threads: int, tokens: int) -> None:
        os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
        from kt_kernel import kt_kernel_ext as ext

        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.cpu = ext.CPUInfer(pool)
        config = ext.moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, WIDTH, 0)
        config.pool, config.layer_idx, config.hidden_type = self.cpu.backend_, 0, 30
        config.m_block, config.group_min_len, config.max_len = 32, 10, max(tokens, 512)
        config.group_max_len = max(tokens, 512)
        config.gate_proj, config.up_proj, config.down_proj = (w.ctypes.data for w in weights)
        config.gate_type, config.up_type, config.down_type = map(int, (Q4_K, Q4_K, Q6_K))
        self.weights = weights
        self.moe = ext.moe.MOE(config)
        self._do(self.moe.load_weights_task())
        self.name = "kt-kernel: GGUF path"

    def _do(self, task: object) -> None:
        self.cpu.submit(task)
        self.cpu.sync()

    def call(self, calls: list[torch.Tensor], weights: torch.Tensor, x: torch.Tensor) -> Callable[[], None]:
        n = len(x)
        size, x16 = torch.tensor([n], dtype=torch.int32), x.bfloat16().contiguous()
        ids64, w = [ids.long().contiguous() for ids in calls], weights.contiguous()
        out = torch.empty(n, HIDDEN, dtype=torch.bfloat16)

        def run() -> None:
            for ids in ids64:
                pointers = (size, ids, w, x16, out)
                at = [tensor.data_ptr() for tensor in pointers]
                self._do(self.moe.forward_task(at[0], TOP_K, at[1], at[2], at[3], at[4], False))

        return run


def rotating_ids(n: int, turn: int, shared: bool) -> torch.Tensor:
    """int32 [n, TOP_K]. The next call goes on where this one ended; 37 is odd, so that all experts come in turn."""
    first = (
        torch.zeros(n, 1) + turn * TOP_K if shared else torch.arange(n)[:, None] * TOP_K + turn * n * TOP_K
    )
    return ((first + torch.arange(TOP_K)) * 37 % EXPERTS).int()


def serve(engine: Ours | KtKernel, shared: bool) -> None:
    """The child: a line `tokens turn` in, seconds out; `read` measures the read bandwidth."""
    print(engine.name, flush=True)
    for line in sys.stdin:
        if line.strip() == "read":
            print(engine.read_gb_s() if isinstance(engine, Ours) else 0.0, flush=True)
            continue
        n, turn = map(int, line.split())
        calls = [rotating_ids(n, CALLS * turn + i, shared) for i in range(CALLS)]
        run = engine.call(calls, torch.full((n, TOP_K), 1 / TOP_K), torch.randn(n, HIDDEN))
        start = time.perf_counter()
        run()
        print((time.perf_counter() - start) / CALLS, flush=True)


class Child:
    """An engine in a process of its own, stopped between two questions."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.name = self._line()
        while not self.name.startswith(("moeserve", "kt-kernel: ")):  # kt-kernel talks while it loads
            self.name = self._line()
        self.process.send_signal(signal.SIGSTOP)

    def ask(self, question: str) -> float:
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(question + "\n")
        answer = float(self._line())
        self.process.send_signal(signal.SIGSTOP)
        return answer

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()


def measure(children: list[Child], n: int, repeats: int) -> list[list[float]]:
    """Seconds of each call of each engine; the first two calls of each warm up."""
    times = [[child.ask(f"{n} {turn}") for child in children] for turn in range(repeats + 2)]
    return [list(seconds) for seconds in zip(*times[2:], strict=True)]


def row(name: str, n: int, seconds: list[float], shared: bool) -> str:
    distinct = TOP_K if shared else min(EXPERTS, n * TOP_K)
    median = statistics.median(seconds)
    return (
        f"  {name:<24}{n:>6} tokens {median * 1e3:>9.3f} ms {distinct * EXPERT_BYTES / median / 1e9:>8.1f} GB/s"
        f"{n * OPS / median / 1e9:>9.0f} GOPS"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", default="1,2,4,8,16,64,512")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--isa", default="")
    parser.add_argument("--kt", action="store_true", help="compare with kt-kernel, which must be installed")
    parser.add_argument("--shared", action="store_true", help="all tokens of a call ask for the same experts")
    parser.add_argument("--child", choices=("ours", "kt"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = [int(n) for n in args.tokens.split(",")]
    if args.child:
        serve(engine(args.child, int(args.threads), args.isa, max(tokens)), args.shared)
        return
    for threads in args.threads.split(","):
        options = [
            "--threads",
            threads,
            "--tokens",
            args.tokens,
            "--isa",
            args.isa,
            *["--shared"] * args.shared,
        ]
        children = [Child("--child", name, *options) for name in (("ours", "kt") if args.kt else ("ours",))]
        for n in tokens:
            read = children[0].ask("read")
            times = measure(children, n, args.repeats)
            print(f"{threads} threads, {read:.1f} GB/s read")
            for child, seconds in zip(children, times, strict=True):
                print(row(child.name, n, seconds, args.shared), flush=True)
            if len(times) == 2:
                ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
                print(f"  {'speed-up':<24}{statistics.median(ratios):>6.2f} (least {min(ratios):.2f})")
        for child in children:
            child.process.kill()


def engine(name: str, threads: int, isa: str, tokens: int) -> Ours | KtKernel:
    torch.set_num_threads(1)  # OpenMP's threads would spin on for milliseconds beside the engine's own
    rng = np.random.default_rng(0)
    shapes = ((Q4_K, WIDTH, HIDDEN), (Q4_K, WIDTH, HIDDEN), (Q6_K, HIDDEN, WIDTH))
    weights = [random_blocks(rng, *shape) for shape in shapes]
    return Ours(weights, threads, isa, tokens) if name == "ours" else KtKernel(weights, threads, tokens)


if __name__ == "__main__":
    main()
