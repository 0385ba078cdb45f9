#!/usr/bin/env python3
"""All experts of Qwen3-30B-A3B's shape on the CPU, handed over from a CUDA graph of 48 layers.

    python -m benchmarks.gpu.handoff [--threads 16] [--layers 48] [--tokens 1,4,8,16]

Weights have random bits (Q4_K, in every other layer Q6_K for down); a row's experts are drawn uniformly. A step is the
layers' publish and collect and nothing else. "pool alone" is the same layers' experts queued on the pool by Python, a
thousand operations ahead, with the same routing: what the hand-off costs is the difference. GB/s counts each distinct
expert of a layer once; "of read" is that over what the same threads read when they only read, in this run.

"host functions" is the step written with copies and host functions (host_functions.py); "nothing on the CPU" has the
same launches with no row for the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.host_functions import HostFunctions
from benchmarks.moe_layer import BYTES, EXPERTS, HIDDEN, Q4_K, Q6_K, TOP_K, WIDTH, random_blocks
from moeserve.kernels.cpu_stream import Activations, CpuStream, Matrix, RoutingRoom
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff
from moeserve.worker.places import plan_places

STEPS = 4  # in one measurement: the pool's first waking is no part of a serving step
REPEATS = 7


class Bench:
    def __init__(self, threads: int, layers: int, most: int) -> None:
        self.stream = CpuStream(plan_places(threads, None, "auto"))
        everyone = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
        self.layers = [CpuExperts(gate, up, down, everyone) for gate, up, down in self._matrices(layers)]
        self.room = RoutingRoom(most, EXPERTS, TOP_K)
        self.y, self.h = Activations(most, HIDDEN), Activations(most * TOP_K, WIDTH, f32=False)
        self.heat = torch.zeros(2, EXPERTS, dtype=torch.int64)
        self.most = most

    def _matrices(self, layers: int) -> list[tuple[Matrix, Matrix, Matrix]]:
        rng = np.random.default_rng(0)
        shapes = {"up": (Q4_K, WIDTH, HIDDEN), "down": (Q4_K, HIDDEN, WIDTH), "more": (Q6_K, HIDDEN, WIDTH)}
        blocks = {name: random_blocks(rng, *shape) for name, shape in shapes.items()}

        def pack(name: str) -> Matrix:
            return self.stream.pack(blocks[name], shapes[name][0], (EXPERTS, *shapes[name][1:]))

        return [(pack("up"), pack("up"), pack("more" if i % 2 == 0 else "down")) for i in range(layers)]

    def handoff(self, *, polling: bool) -> ExpertHandoff:
        return ExpertHandoff(
            self.stream, self.layers, self.most, HIDDEN, TOP_K, timeout_s=10, polling=polling
        )

    def read_gb_s(self) -> float:
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            for e in self.layers:
                for matrix in e.matrices:
                    self.stream.read(matrix)
            self.stream.wait()
            nbytes = sum(m.bytes for e in self.layers for m in e.matrices)
            best = max(best, nbytes / (time.perf_counter() - start) / 1e9)
        return best

    def alone(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        """Seconds of a layer; ids [STEPS, layers, n, TOP_K]."""
        n = len(x)
        self.stream.norm(x, torch.ones(HIDDEN), 1e-6, n, self.y)
        rooms = []
        for step in ids:
            for chosen in step:
                room = RoutingRoom(n, 0, TOP_K)
                room.starts, room.active, room.routes = self.room.starts, self.room.active, self.room.routes
                room.ids, room.weights = chosen.contiguous(), weights
                rooms.append(room)
        out = torch.zeros(n, HIDDEN)
        self.stream.wait()
        start = time.perf_counter()
        for i, room in enumerate(rooms):
            e = self.layers[i % len(self.layers)]
            self.stream.experts(e.gate, e.up, e.down, self.y, n, room, self.h, self.heat, out)
        self.stream.wait()
        return (time.perf_counter() - start) / len(rooms)


class Step:
    """publish and collect of every layer in a CUDA graph."""

    def __init__(
        self, handoff: ExpertHandoff, by: ExpertHandoff | HostFunctions, layers: int, n: int
    ) -> None:
        self.handoff, self.layers = handoff, layers
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
        return float(start.elapsed_time(end)) / 1e3 / len(ids) / self.layers


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
    room = RoutingRoom(n, EXPERTS, TOP_K)
    room.ids.copy_(ids[0, last]), room.weights.fill_(1 / TOP_K)
    out, e = torch.zeros(n, HIDDEN), bench.layers[last]
    stream.experts(e.gate, e.up, e.down, y, n, room, bench.h, bench.heat, out)
    stream.wait()
    assert torch.equal(out, step.out[last].cpu()), (out - step.out[last].cpu()).abs().max()


def compare(bench: Bench, n: int, read: float) -> None:
    layers = len(bench.layers)
    routings = [draw(STEPS, layers, n, seed) for seed in range(REPEATS)]
    on_gpu = [routing.cuda() for routing in routings]
    nothing = [torch.full_like(on_gpu[0], -1)] * REPEATS
    x, weights = torch.randn(n, HIDDEN), torch.full((n, TOP_K), 1 / TOP_K)
    nbytes = distinct_bytes(bench, routings[0])

    def alone(routing: Tensor) -> float:
        return bench.alone(x, routing, weights)

    base = typical(alone, routings)
    print(f"\n{n} tokens: pool alone {base * 1e6:.1f} us a layer, {nbytes / base / 1e9:.0f} GB/s, "
          f"{nbytes / base / 1e9 / read:.2f} of read", flush=True)  # fmt: skip

    def row(name: str, seconds: float, base: float = base) -> None:
        print(f"  {name:<28}{seconds * 1e6:>8.1f} us a layer {(seconds - base) * 1e6:>+8.1f}", flush=True)

    for name, polling in (("memory operations", False), ("polling kernel", True)):
        handoff = bench.handoff(polling=polling)
        step = Step(handoff, handoff, layers, n)
        if not polling:
            check(bench, step)
        row(name, typical(step.seconds, on_gpu))
        row("  nothing on the CPU", typical(step.seconds, nothing), 0.0)
        if not polling:
            other = Step(handoff, HostFunctions(handoff, n), layers, n)
            row("copies and host functions", typical(other.seconds, on_gpu))
            row("pool alone, again", typical(alone, routings))
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
    start = time.perf_counter()
    bench = Bench(args.threads, args.layers, max(tokens))
    read = bench.read_gb_s()
    print(f"{args.threads} threads, {args.layers} layers packed in {time.perf_counter() - start:.0f} s, "
          f"{read:.0f} GB/s read, {BYTES[Q4_K] * 8:.2f} and {BYTES[Q6_K] * 8:.2f} bits a weight")  # fmt: skip
    for n in tokens:
        compare(bench, n, read)


if __name__ == "__main__":
    main()
