"""A decode step's attention at a long context, to the keys that an indexer chooses and to all.

One layer's attention of the published shape: with the indexer, whose products (Q8_0, random) count, and without. In
both the products of attention itself are left out. KV and queries are random. A round is one step of either, which
of them first in turn. Printed: milliseconds of CPU time a layer, by all threads together, and the median of the ratios
with its 90% interval by bootstrap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

from benchmarks.paired import median_interval
from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.choice_rule import ALL_KEYS, ChoiceRule
from moeserve.kernels.cpu_stream import AttentionPlan, CpuStream, LinearGroup
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer

RANK, ROTARY, DIM, TOP = 512, 64, 128, 2048
LAYERS = 4  # whose keys are read in turn, so that caches hold none of them


@dataclass(frozen=True)
class Shape:
    hidden: int
    q_rank: int
    heads: int
    index_heads: int


@dataclass(frozen=True)
class BlockShape:
    """One layer of a model that chooses blocks of keys."""

    hidden: int
    heads: Heads
    index_heads: int
    rotary: int
    rule: ChoiceRule


SHAPES: dict[str, Shape | BlockShape] = {
    "glm-5": Shape(6144, 2048, 64, 32),
    "deepseek-v3.2": Shape(7168, 1536, 128, 64),
    "flash-next": BlockShape(2560, Heads(24, 2, 256), 4, 64, ChoiceRule(512, 4)),
    "minimax-m3": BlockShape(6144, Heads(64, 4, 128), 4, 64, ChoiceRule(15, 128, 1)),
}


class Layer:
    """One layer's index weights and KV of one sequence."""

    def __init__(self, stream: CpuStream, shape: Shape, context: int) -> None:
        def group(*rows: int, cols: int) -> LinearGroup:
            weights = [np.random.default_rng(0).standard_normal((each, cols), np.float32) for each in rows]
            matrices = [stream.pack(quantize(w, Type.Q8_0), int(Type.Q8_0), (len(w), cols)) for w in weights]
            self._kept += matrices
            return LinearGroup(matrices)

        self._kept: list[object] = []
        self.inputs = group(DIM, shape.index_heads, cols=shape.hidden)
        self.q_b = group(shape.index_heads * DIM, cols=shape.q_rank)
        keys, index_keys = (torch.randn(context, 1, width).half() for width in (RANK + ROTARY, DIM))
        self.kv = KvLayer(keys, keys[:, :, :RANK], index_keys=index_keys)


class Step:
    """One row at the end of a context."""

    def __init__(self, stream: CpuStream, shape: Shape, context: int) -> None:
        self._stream, self._shape = stream, shape
        self._layers = [Layer(stream, shape, context) for _ in range(LAYERS)]
        self._table = np.random.default_rng(1).permutation(context).astype(np.int32)[None]
        self._at = [np.array([value], np.int32) for value in (0, 1, context - 1, 0)]
        parts = next(p for p in range(1, shape.heads + 1) if shape.heads % p == 0 and shape.heads // p <= 8)
        self._heads = Heads(shape.heads, parts, RANK + ROTARY, RANK, is_latent=True)
        self._q = torch.randn(1, shape.heads, RANK + ROTARY) / 24
        self._out = Activations(shape.heads, RANK)
        self._y, self._q_a = Activations(1, shape.hidden), Activations(1, shape.q_rank)
        for activations in (self._y, self._q_a):
            stream.norm(
                torch.randn(1, activations.f32.shape[1]),
                torch.ones(activations.f32.shape[1]),
                1e-6,
                1,
                activations,
            )
        self._index = [torch.empty(1, width) for width in (DIM, shape.index_heads, shape.index_heads * DIM)]
        self._ones, self._angles = torch.ones(DIM), torch.zeros(1, ROTARY // 2)
        self._slot = torch.from_numpy(self._table[0, -1:].copy())
        stream.wait()

    def seconds(self, *, chooses: bool) -> float:
        """The CPU time of a layer's attention, to chosen keys or to all."""
        stream, plan = self._stream, AttentionPlan()
        row, count, position, req_slot = self._at
        top = TOP if chooses else 0
        began = time.process_time()
        build_attention_plan(
            plan,
            row,
            count,
            position,
            req_slot,
            self._table,
            self._heads,
            stream.threads,
            rule=ChoiceRule(top),
        )
        for layer in self._layers:
            if chooses:
                self._choose(layer, plan)
            stream.attention(plan, self._q, layer.kv, self._out, self._heads)
        stream.wait()
        return (time.process_time() - began) / LAYERS

    def _choose(self, layer: Layer, plan: AttentionPlan) -> None:
        keys, weights, q = self._index
        heads = self._shape.index_heads
        self._stream.linear(self._y, 1, layer.inputs, [keys, weights])
        self._stream.linear(self._q_a, 1, layer.q_b, [q])
        self._stream.index_store(
            q, keys, self._ones, self._ones, 1e-6, self._angles, self._angles, self._slot, layer.kv, 1, heads,
            in_pairs=True,
        )  # fmt: skip
        self._stream.choose_keys(plan, q, weights, layer.kv, heads)


class BlockLayer:
    """One layer's index weights and KV of one sequence."""

    def __init__(self, stream: CpuStream, shape: BlockShape, context: int) -> None:
        rows = (shape.index_heads * DIM, DIM)
        weights = [np.random.default_rng(0).standard_normal((n, shape.hidden), np.float32) for n in rows]
        self._kept = [stream.pack(quantize(w, Type.Q8_0), int(Type.Q8_0), w.shape) for w in weights]
        self.inputs = LinearGroup(self._kept)
        heads = shape.heads
        keys, values = (torch.randn(context, heads.num_kv, heads.dim).half() for _ in "kv")
        self.kv = KvLayer(keys, values, index_keys=torch.randn(context, 1, DIM).half())


class BlockStep:
    """One row at the end of a context."""

    def __init__(self, stream: CpuStream, shape: BlockShape, context: int) -> None:
        self._stream, self._shape = stream, shape
        self._layers = [BlockLayer(stream, shape, context) for _ in range(LAYERS)]
        self._table = np.random.default_rng(1).permutation(context).astype(np.int32)[None]
        self._at = [np.array([value], np.int32) for value in (0, 1, context - 1, 0)]
        heads = shape.heads
        self._q = torch.randn(1, heads.num, heads.dim) / heads.dim**0.5
        self._out, self._y = Activations(1, heads.num * heads.dim), Activations(1, shape.hidden)
        stream.norm(torch.randn(1, shape.hidden), torch.ones(shape.hidden), 1e-6, 1, self._y)
        self._index = [torch.empty(1, width) for width in (shape.index_heads * DIM, DIM)]
        self._ones, self._angles = torch.ones(DIM), torch.zeros(context, shape.rotary // 2)
        stream.wait()

    def seconds(self, *, chooses: bool) -> float:
        """The CPU time of a layer's attention, to chosen blocks or to all keys."""
        stream, shape, plan = self._stream, self._shape, AttentionPlan()
        row, count, position, req_slot = self._at
        rule = shape.rule if chooses else ALL_KEYS
        began = time.process_time()
        build_attention_plan(
            plan, row, count, position, req_slot, self._table, shape.heads, stream.threads, rule=rule
        )
        for layer in self._layers:
            if chooses:
                self._choose(layer, plan)
            stream.attention(plan, self._q, layer.kv, self._out, shape.heads)
        stream.wait()
        return (time.process_time() - began) / LAYERS

    def _choose(self, layer: BlockLayer, plan: AttentionPlan) -> None:
        (q, keys), heads = self._index, self._shape.index_heads
        self._stream.linear(self._y, 1, layer.inputs, [q, keys])
        self._stream.index_blocks(
            plan, q, keys, self._ones, self._ones, 1e-6, self._angles, self._angles, layer.kv, heads
        )
        self._stream.choose_keys(plan, q, None, layer.kv, heads)


def print_ratio(name: str, context: int, rounds: int, threads: int) -> None:
    torch.manual_seed(0)
    shape, stream = SHAPES[name], CpuStream(threads)
    step = Step(stream, shape, context) if isinstance(shape, Shape) else BlockStep(stream, shape, context)
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for chooses in (False, True) if number % 2 == 0 else (True, False):
            took[chooses].append(step.seconds(chooses=chooses))
    dense, sparse = (np.array(took[chooses][1:]) for chooses in (False, True))
    middle, low, high = median_interval(list(sparse / dense))
    print(
        f"{name}, {context} tokens: to all keys {np.median(dense) * 1e3:.2f} ms of CPU time a layer, ", end=""
    )
    print(f"to chosen ones {np.median(sparse) * 1e3:.2f} ms; ratio {middle:.3f} ({low:.3f} to {high:.3f})")
