"""A decode step: embedding, 48 layers, head and greedy choice in one CUDA graph, with 48 layers' own weights."""

from __future__ import annotations

import torch

from benchmarks.gpu.layer import Q4, Q6, LayerWeights, LayerWorkspace, StepRows, layer, random_layer, sums_of
from benchmarks.gpu.shape import BYTES_PER_S, SHAPE, random_planes, seconds, tensors
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.embed.op import embed
from moeserve.kernels.linear.op import int8_tokens, linear
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, sample

CONTEXT = 256  # tokens that every row attends to
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Model:
    def __init__(self, layers: int) -> None:
        s = SHAPE
        self.table = random_planes(Q4, s.vocab, s.hidden)
        self.head = random_planes(Q6, s.vocab, s.hidden)
        self.layers: list[LayerWeights] = [random_layer(i) for i in range(layers)]
        slots = max(BATCHES) * CONTEXT  # enough for any batch
        self.keys = [torch.randn(slots, s.kv_heads, s.dim, device="cuda").half() for _ in range(layers)]
        self.values = [torch.randn(slots, s.kv_heads, s.dim, device="cuda").half() for _ in range(layers)]

    def bytes_of_step(self, n: int) -> float:
        """Bytes of weights and KV that a step of n rows must read, with as many distinct experts as uniform routing
        has."""
        total = float(self.head.nbytes)
        distinct = SHAPE.experts * (1.0 - (1.0 - SHAPE.top_k / SHAPE.experts) ** n)
        for w in self.layers:
            total += sum(p.nbytes for p in (w.qkv, w.v_merged, w.attn_output, w.router) if p)
            total += sum(p.nbytes for p in (w.gate, w.up, w.down)) * distinct / SHAPE.experts
        kv = n * CONTEXT * SHAPE.kv_heads * SHAPE.dim * 2 * 2 * len(self.layers)
        return total + kv


def batch_of(n: int) -> StepRows:
    s = SHAPE
    angles = torch.rand(CONTEXT, s.dim // 2, device="cuda")
    table = torch.randperm(n * CONTEXT, device="cuda").int().view(n, CONTEXT)
    positions = torch.full((n,), CONTEXT - 1, dtype=torch.int32, device="cuda")
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    return StepRows(positions, table[:, -1].contiguous(), rows, table, angles.cos(), angles.sin())


class Step:
    """One step at a batch size, with everything it needs allocated."""

    def __init__(self, model: Model, n: int) -> None:
        s = SHAPE
        self.model, self.workspace, self.batch = model, LayerWorkspace(n), batch_of(n)
        self.tokens = torch.randint(0, s.vocab, (n,), dtype=torch.int32, device="cuda")
        self.picked = torch.empty_like(self.tokens)
        small_batch = n <= int8_tokens(s.vocab)
        self.final = GpuActivations.empty(
            n, s.hidden, "cuda", dtype=None if small_batch else torch.bfloat16, quantised=small_batch
        )
        self.logits = torch.empty(n, s.vocab, device="cuda")
        self.sampler, self.sampling = (
            DeviceSamplerState(n, s.vocab, "cuda", 0),
            SamplingWorkspace(n, s.vocab, "cuda"),
        )
        for slot in range(n):
            self.sampler.bind(slot, temperature=0.0)

    def run(self, _: int = 0) -> None:
        self.run_layers()
        self.run_head()

    def run_layers(self, _: int = 0) -> None:
        m, r = self.model, self.workspace
        embed(self.tokens, r.count, tensors(m.table), int(m.table.type), r.x)
        for i, w in enumerate(m.layers):
            layer(w, r, self.batch, m.keys[i], m.values[i], i)

    def run_head(self) -> None:
        m, r, f, st, workspace = self.model, self.workspace, self.final, self.sampler, self.sampling
        add_norm(
            r.x, *sums_of(r), self.batch.req_slots, r.count, m.layers[0].attn_norm, SHAPE.eps,
            f.x, f.codes, f.scales,
        )  # fmt: skip
        linear(
            f.x,
            f.codes,
            f.scales,
            r.count,
            tensors(m.head),
            int(m.head.type),
            None,
            0,
            SHAPE.hidden,
            self.logits,
        )
        sample(
            self.logits, self.batch.req_slots, r.count, st.params, st.bias_ids, st.bias_values, st.stop_ids, st.history,
            None, None, workspace.block_max, workspace.block_sum, workspace.values, workspace.ids, self.picked,
        )  # fmt: skip


def run() -> None:
    model = Model(SHAPE.layers)
    print(f"decode, {len(model.layers)} layers, context {CONTEXT}, greedy:")
    for n in BATCHES:
        step = Step(model, n)
        step.run()
        torch.cuda.synchronize()
        whole = seconds(step.run, 1)
        layers = seconds(step.run_layers, 1)
        floor = model.bytes_of_step(n) / BYTES_PER_S
        assert torch.isfinite(step.logits).all()
        assert (step.picked >= 0).all()
        print(
            f"batch {n:3}: {whole * 1e3:7.3f} ms a step, {n / whole:7.0f} tok/s, "
            f"{layers / len(model.layers) * 1e6:6.1f} us a layer, head and choice {(whole - layers) * 1e6:6.1f} us, "
            f"{floor / whole:5.1%} of the memory floor",
            flush=True,
        )


def warm_up_cases() -> list[tuple[int]]:
    return [(n,) for n in BATCHES]


def warm_up(n: int) -> None:
    model = Model(2)
    step = Step(model, n)
    step.run()
    torch.cuda.synchronize()
