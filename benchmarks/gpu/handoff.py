#!/usr/bin/env python3
"""What handing a layer's experts to the CPU costs, and all experts of Qwen3-30B-A3B's shape on the CPU.

    python -m benchmarks.gpu.handoff [--threads 16] [--layers 48] [--tokens 1,4,8,16]

A step is the layers' publish and collect in one CUDA graph, and nothing else. "pool alone" is the same experts queued
on the pool by Python, far ahead, with the same routing: what the hand-off costs is the difference.

First with experts of no size to speak of (width 256, one for each row, the same for all layers), so that the difference
is not lost in the memory's noise, beside the step written with copies and host functions (host_functions.py), with one
thread less than --threads, too: the thread that calls host functions spins, and a pool thread that shares its core
holds up all others. Then with random weights of the whole shape (Q4_K, in every other layer Q6_K for down) and experts
drawn uniformly. GB/s counts each distinct expert of a layer once; "of read" is that over what the same threads read
when they only read, just before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.host_functions import HostFunctions
from benchmarks.moe_layer import EXPERTS, HIDDEN, TOP_K, WIDTH, random_blocks
from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff
from moeserve.kernels.stream_operands import Activations, RoutingWorkspace
from moeserve.quantization.table import Q4_K, Q6_K
from moeserve.worker.loading.cpu.thread_placement import place_threads

STEPS = 4  # in one measurement: the pool's first waking is no part of a serving step
REPEATS = 7


class Bench:
    def __init__(self, threads: int, layers: int, most: int, width: int, *, same: bool) -> None:
        """same: all layers are one."""
        self.stream = CpuStream(place_threads(threads, None, "auto"))
        self.width = width
        everyone = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
        matrices = self._matrices(1 if same else layers)
        self.layers = [CpuExperts(*matrices[0 if same else i], everyone) for i in range(layers)]
        self.workspace = RoutingWorkspace(most, EXPERTS, TOP_K)
        self.y, self.h = Activations(most, HIDDEN), Activations(most * TOP_K, width, f32=False)
        self.expert_token_counts = torch.zeros(2, EXPERTS, dtype=torch.int64)
        self.most = most

    def _matrices(self, layers: int) -> list[tuple[Matrix, Matrix, Matrix]]:
        rng = np.random.default_rng(0)
        up, down = (self.width, HIDDEN), (HIDDEN, self.width)
        shapes = {"up": (Q4_K, *up), "down": (Q4_K, *down), "more": (Q6_K, *down)}
        blocks = {name: random_blocks(rng, *shape) for name, shape in shapes.items()}

        def pack(name: str) -> Matrix:
            return self.stream.pack(blocks[name], int(shapes[name][0]), (EXPERTS, *shapes[name][1:]))

        return [(pack("up"), pack("up"), pack("more" if i % 2 == 0 else "down")) for i in range(layers)]

    def handoff(self) -> ExpertHandoff:
        return ExpertHandoff(self.stream, self.layers, self.most, HIDDEN, TOP_K, timeout_s=10)

    def read_gb_s(self) -> float:
        start = time.perf_counter()
        for e in self.layers:
            for matrix in e.matrices:
                self.stream.read(matrix)
        self.stream.wait()
        nbytes = sum(m.bytes for e in self.layers for m in e.matrices)
        return nbytes / (time.perf_counter() - start) / 1e9

    def alone(self, x: Tensor, weights: Tensor, ids: Tensor) -> float:
        """Seconds of a layer; ids [STEPS, layers, n, TOP_K]."""
        n = len(x)
        self.stream.norm(x, torch.ones(HIDDEN), 1e-6, n, self.y)
        workspaces = []
        for step in ids:
            for chosen in step:
                workspace = RoutingWorkspace(n, 0, TOP_K)
                workspace.starts, workspace.active, workspace.routes = (
                    self.workspace.starts,
                    self.workspace.active,
                    self.workspace.routes,
                )
                workspace.ids, workspace.weights = chosen.contiguous(), weights
                workspaces.append(workspace)
        out = torch.zeros(n, HIDDEN)
        self.stream.wait()
        start = time.perf_counter()
        for i, workspace in enumerate(workspaces):
            e = self.layers[i % len(self.layers)]
            self.stream.experts(
                e.gate, e.up, e.down, self.y, n, workspace, self.h, self.expert_token_counts, out
            )
        self.stream.wait()
        return (time.perf_counter() - start) / len(workspaces)


class Step:
    """publish and collect of every layer in a CUDA graph."""

    def __init__(
        self, handoff: ExpertHandoff, by: ExpertHandoff | HostFunctions, layers: int, n: int
    ) -> None:
        self.handoff, self.layers, self.by = handoff, layers, by
        self.ids = torch.full((layers, n, TOP_K), -1, dtype=torch.int32, device="cuda")
        self.weights = torch.full((n, TOP_K), 1 / TOP_K, device="cuda")
        self.x = torch.randn(n, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(n))
        self.out = torch.empty(layers, n, HIDDEN, device="cuda")
        self.done = torch.cuda.Event(blocking=True)  # a thread that spins would take a core from the pool
        self.graph = torch.cuda.CUDAGraph()
        if by is handoff:  # compiles, with nothing for the CPU
            handoff.begin()
            self._launch(by)
            torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self._launch(by)

    def _launch(self, by: ExpertHandoff | HostFunctions) -> None:
        for layer in range(self.layers):
            by.publish(layer, self.x, self.ids[layer], self.weights)
            by.collect(layer, self.out[layer])

    def seconds(self, ids: Tensor) -> float:
        """Of a layer; ids [STEPS, layers, n, TOP_K], on the device."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for i, chosen in enumerate(ids):
            self.handoff.begin()
            if i == 0:
                start.record()
            self.ids.copy_(chosen)
            self.graph.replay()
        end.record()
        self.done.record()
        self.done.synchronize()
        self.handoff.check()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / len(ids) / self.layers


def draw(steps: int, layers: int, n: int, seed: int) -> Tensor:
    """Uniform: int32 [steps, layers, n, TOP_K]."""
    scores = torch.rand(steps, layers, n, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(TOP_K).indices.int()


def distinct_bytes(bench: Bench, ids: Tensor) -> float:
    """Of a layer, on average."""
    sizes = torch.tensor([sum(m.bytes for m in e.matrices) / EXPERTS for e in bench.layers])
    counts = torch.tensor([[len(chosen.unique()) for chosen in step] for step in ids]).float()
    return (counts * sizes).mean().item()


def typical(measure: Callable[[Tensor], float], routings: list[Tensor]) -> float:
    return statistics.median(measure(routing) for routing in routings)


def check(bench: Bench, step: Step) -> None:
    """What came over is what the pool computes of the same rows, bit for bit."""
    n = len(step.x)
    ids = draw(1, step.layers, n, 99)
    step.seconds(ids.cuda())
    stream, y = bench.stream, Activations(bench.most, HIDDEN)
    last = step.layers - 1
    q8 = step.handoff._region.slots[last % 2].q8
    assert q8 is not None
    y.q8[:n].copy_(q8[:n])
    workspace = RoutingWorkspace(n, EXPERTS, TOP_K)
    workspace.ids.copy_(ids[0, last]), workspace.weights.fill_(1 / TOP_K)
    out, e = torch.zeros(n, HIDDEN), bench.layers[last]
    stream.experts(e.gate, e.up, e.down, y, n, workspace, bench.h, bench.expert_token_counts, out)
    stream.wait()
    assert torch.equal(out, step.out[last].cpu()), (out - step.out[last].cpu()).abs().max()


def row(name: str, seconds: float, base: float) -> None:
    print(f"  {name:<28}{seconds * 1e6:>8.1f} us a layer {(seconds - base) * 1e6:>+8.1f}", flush=True)


def mechanism(threads: int, layers: int, tokens: list[int]) -> None:
    bench = Bench(threads, layers, max(tokens), 256, same=True)
    for n in tokens:
        ids = torch.full((STEPS, layers, n, TOP_K), -1, dtype=torch.int32)
        ids[..., 0] = torch.arange(n, dtype=torch.int32) * 5
        routings, on_gpu = [ids] * REPEATS, [ids.cuda()] * REPEATS
        nothing = [torch.full_like(on_gpu[0], -1)] * REPEATS
        x, weights = torch.randn(n, HIDDEN), torch.full((n, TOP_K), 1 / TOP_K)
        base = typical(partial(bench.alone, x, weights), routings)
        print(
            f"\n{threads} threads, {n} tokens, small experts: pool alone {base * 1e6:.1f} us a layer",
            flush=True,
        )
        handoff = bench.handoff()
        step = Step(handoff, handoff, layers, n)
        row("hand-off", typical(step.seconds, on_gpu), base)
        row("  nothing on the CPU", typical(step.seconds, nothing), 0.0)
        step = Step(handoff, HostFunctions(handoff, n), layers, n)
        row("copies and host functions", typical(step.seconds, on_gpu[:3]), base)
        row("pool alone, again", typical(partial(bench.alone, x, weights), routings), base)
        handoff.close()


def whole_shape(threads: int, layers: int, tokens: list[int]) -> None:
    bench = Bench(threads, layers, max(tokens), WIDTH, same=False)
    print(
        f"\n{threads} threads, {layers} layers of {HIDDEN} x {WIDTH} x {EXPERTS}, top {TOP_K}, uniform routing"
    )
    for n in tokens:
        routings = [draw(STEPS, layers, n, seed) for seed in range(REPEATS)]
        on_gpu = [routing.cuda() for routing in routings]
        x, weights = torch.randn(n, HIDDEN), torch.full((n, TOP_K), 1 / TOP_K)
        nbytes = distinct_bytes(bench, routings[0])
        handoff = bench.handoff()
        step = Step(handoff, handoff, layers, n)
        check(bench, step)
        measures: list[Callable[[Tensor], float]] = [partial(bench.alone, x, weights), step.seconds]
        reads, times = [], []
        for i in range(REPEATS):  # in turns: the memory's speed changes from second to second
            reads.append(bench.read_gb_s())
            times.append([measure(r[i]) for measure, r in zip(measures, (routings, on_gpu), strict=True)])
        read = statistics.median(reads)
        for name, seconds in zip(("pool alone", "hand-off"), zip(*times, strict=True), strict=True):
            typical_s = statistics.median(seconds)
            speed = nbytes / typical_s / 1e9
            print(f"  {n:>2} tokens {name:<18}{typical_s * 1e6:>8.1f} us a layer {speed:>5.0f} GB/s, "
                  f"{speed / read:.2f} of {read:.0f} read", flush=True)  # fmt: skip
        handoff.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", default="1,4,8,16")
    args = parser.parse_args()
    tokens = [int(n) for n in args.tokens.split(",")]
    torch.set_num_threads(1)
    for threads in (args.threads, args.threads - 1):
        mechanism(threads, args.layers, [n for n in tokens if n in (1, 16)])
    whole_shape(args.threads, args.layers, tokens)


if __name__ == "__main__":
    main()
