"""Predicted speed: what a step reads, what it computes, and what it costs beside that.

A step of n tokens reads the dense weights and the head once, and each expert that any token is routed to: of E
experts of a layer, with k a token and routing without preference, E (1 - (1 - k/E)^n); with a heat file, the sum over
its experts' own probabilities. It computes the products of each token with its own. Reading and computing overlap, but
not wholly:

    seconds = sqrt(reading^2 + computing^2) + attention + operations + step + rows

which follows measured steps of 1 to 512 tokens, where one of the two is short and where both are alike
(docs/placement.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.placement import ModelSizes, Placement
from moeserve.plan.rates import OPS_A_LAYER, CpuRates, GpuRates
from moeserve.plan.routing import Routing

# Shares of a rate that the engine reaches, measured on two Zen 5 cores with Q4_K_M. Weights are read at 79 to 93% of
# what reading alone reaches; norms, rotation and quantising take a tenth of the time of the products; attention
# multiplies at these shares of the experts' rate.
READ_SHARE = 0.85
PRODUCT_SHARE = 0.9
PREFILL_ATTENTION_SHARE = 0.27
DECODE_ATTENTION_SHARE = 0.063
SAMPLED_VALUES = 1.5e9  # logits that sampling with a temperature looks at a second; greedy is far faster

# The same of the GPU engine, assumed.
GPU_READ_SHARE = 0.75
GPU_OPS_SHARE = 0.45
GPU_LAYER_S = 15e-6  # a layer's kernels, one after another
HANDOFF_S = 10e-6  # to the CPU pool and back, in each layer that has experts in RAM
PCIE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Step:
    """What is in a step."""

    rows: int  # sequences, each with
    tokens: int  # new tokens of a sequence
    context: int  # positions before them

    @property
    def all_tokens(self) -> int:
        return self.rows * self.tokens

    @property
    def pairs(self) -> int:
        """Of a token and a position that it attends to."""
        return self.rows * (self.tokens * self.context + self.tokens * (self.tokens + 1) // 2)


class CpuSpeed:
    """Of the CPU engine."""

    def __init__(self, model: Qwen3MoeConfig, sizes: ModelSizes, routing: Routing, rates: CpuRates) -> None:
        self._model = model
        self._sizes = sizes
        self._routing = routing
        self._rates = rates
        layers = sum(layer.dense.cpu + sizes.num_experts * layer.expert.cpu for layer in sizes.layers)
        self._is_cached = layers + sizes.head.cpu <= rates.cache_bytes

    def decode(self, streams: int, context: int) -> float:
        """Tokens a second of all streams together."""
        return streams / self.seconds(Step(streams, 1, context))

    def prefill(self, tokens: int, step_tokens: int) -> float:
        """Tokens a second of one prompt, in steps of at most so many."""
        seconds = sum(
            self.seconds(Step(1, min(step_tokens, tokens - start), start))
            for start in range(0, tokens, step_tokens)
        )
        return tokens / seconds

    def seconds(self, step: Step) -> float:
        rates, model = self._rates, self._model
        reading = 0.0 if self._is_cached else self._bytes(step) / (rates.read * READ_SHARE)
        computing = self._dense_ops(step) / rates.dense_ops + self._expert_ops(step) / rates.expert_ops
        computing /= PRODUCT_SHARE
        share = DECODE_ATTENTION_SHARE if step.tokens == 1 else PREFILL_ATTENTION_SHARE
        attention = attention_ops(model, step) / (share * rates.expert_ops)
        operations = model.num_layers * OPS_A_LAYER * rates.op_s
        rows = step.rows * (rates.row_s + model.vocab_size / SAMPLED_VALUES)
        return math.hypot(reading, computing) + attention + operations + rates.step_s + rows

    def _bytes(self, step: Step) -> float:
        tokens = step.all_tokens
        return self._sizes.head.cpu + sum(
            layer.dense.cpu + float(self._routing.touched(index, tokens).sum()) * layer.expert.cpu
            for index, layer in enumerate(self._sizes.layers)
        )

    def _dense_ops(self, step: Step) -> float:
        return 2.0 * (
            step.all_tokens * dense_parameters(self._model)
            + step.rows * self._model.vocab_size * self._model.hidden_size
        )

    def _expert_ops(self, step: Step) -> float:
        return 2.0 * step.all_tokens * expert_parameters(self._model)


class HybridSpeed:
    """Of a GPU with the CPU's pool beside it: both compute their experts of a layer at the same time. The first layers
    may be the CPU's alone."""

    def __init__(
        self,
        model: Qwen3MoeConfig,
        sizes: ModelSizes,
        routing: Routing,
        placement: Placement,
        cpu: CpuRates,
        gpu: GpuRates,
    ) -> None:
        self._model = model
        self._sizes = sizes
        self._routing = routing
        self._placement = placement
        self._cpu = cpu
        self._gpu = gpu

    def decode(self, streams: int, context: int) -> float:
        step = Step(streams, 1, context)
        kv = streams * context * self._sizes.kv_bytes * len(self._placement.gpu_layers)
        attention = kv / self._gpu_read + self._cpu_attention_seconds(step, DECODE_ATTENTION_SHARE)
        head = self._gpu_seconds(self._sizes.head.cuda, 2.0 * streams * self._head_parameters)
        layers = sum(self._layer_seconds(step, index) for index in range(self._model.num_layers))
        return streams / (layers + head + attention)

    def prefill(self, tokens: int, step_tokens: int) -> float:
        seconds = 0.0
        for start in range(0, tokens, step_tokens):
            step = Step(1, min(step_tokens, tokens - start), start)
            on_gpu = len(self._placement.gpu_layers) / self._model.num_layers
            seconds += on_gpu * attention_ops(self._model, step) / (self._gpu.ops * GPU_OPS_SHARE)
            seconds += self._cpu_attention_seconds(step, PREFILL_ATTENTION_SHARE)
            seconds += sum(
                self._prefill_layer_seconds(step, index) for index in range(self._model.num_layers)
            )
        return tokens / seconds

    def _prefill_layer_seconds(self, step: Step, index: int) -> float:
        """RAM experts are computed where they are, or streamed: whichever is faster, as the engine calibrates."""
        here = self._layer_seconds(step, index)
        layer = self._placement.layers[index]
        in_ram = self._model.num_experts - len(layer.gpu_experts)
        if not in_ram or layer.prefill == "cpu" or layer.dense == "cpu":
            return here
        sizes, tokens = self._sizes.layers[index], step.all_tokens
        copying = in_ram * sizes.expert.cpu / (self._gpu.pcie * PCIE_SHARE)
        weights = sizes.dense.cuda + self._model.num_experts * sizes.expert.cuda
        ops = 2.0 * tokens * (dense_parameters(self._model) + expert_parameters(self._model))
        streamed = max(copying, self._gpu_seconds(weights, ops / self._model.num_layers)) + GPU_LAYER_S
        return streamed if layer.prefill == "cuda" else min(here, streamed)

    def _layer_seconds(self, step: Step, index: int) -> float:
        layer, sizes = self._placement.layers[index], self._sizes.layers[index]
        tokens, model = step.all_tokens, self._model
        touched = self._routing.touched(index, tokens)
        on_gpu_touched = float(touched[list(layer.gpu_experts)].sum())
        in_ram_touched = float(touched.sum()) - on_gpu_touched
        share = self._routing.share(index, layer.gpu_experts)  # of the routes
        dense_ops = 2.0 * tokens * dense_parameters(model) / model.num_layers
        expert_ops = 2.0 * tokens * expert_parameters(model) / model.num_layers
        in_ram = self._cpu_seconds(
            in_ram_touched * sizes.expert.cpu, (1 - share) * expert_ops, self._cpu.expert_ops
        )
        if layer.dense == "cpu":
            dense = self._cpu_seconds(sizes.dense.cpu, dense_ops, self._cpu.dense_ops)
            return dense + in_ram + OPS_A_LAYER * self._cpu.op_s
        on_gpu = self._gpu_seconds(on_gpu_touched * sizes.expert.cuda, share * expert_ops)
        handoff = HANDOFF_S if len(layer.gpu_experts) < model.num_experts else 0.0
        return self._gpu_seconds(sizes.dense.cuda, dense_ops) + max(on_gpu, in_ram) + handoff + GPU_LAYER_S

    def _cpu_attention_seconds(self, step: Step, share: float) -> float:
        """Of the layers in RAM."""
        in_ram = self._placement.layers_in_ram / self._model.num_layers
        return in_ram * attention_ops(self._model, step) / (share * self._cpu.expert_ops)

    def _cpu_seconds(self, nbytes: float, ops: float, rate: float) -> float:
        return math.hypot(nbytes / (self._cpu.read * READ_SHARE), ops / (rate * PRODUCT_SHARE))

    def _gpu_seconds(self, nbytes: float, ops: float) -> float:
        return math.hypot(nbytes / self._gpu_read, ops / (self._gpu.ops * GPU_OPS_SHARE))

    @property
    def _gpu_read(self) -> float:
        return self._gpu.read * GPU_READ_SHARE

    @property
    def _head_parameters(self) -> int:
        return self._model.vocab_size * self._model.hidden_size


def dense_parameters(model: Qwen3MoeConfig) -> int:
    """Of all layers, outside the experts."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.num_layers * model.hidden_size * (2 * q + 2 * kv + model.num_experts)


def expert_parameters(model: Qwen3MoeConfig) -> int:
    """Of all layers, of the experts that one token is routed to."""
    return model.num_layers * model.top_k * 3 * model.hidden_size * model.expert_ff


def attention_ops(model: Qwen3MoeConfig, step: Step) -> float:
    """Two products for each pair, in each head of each layer."""
    return 4.0 * step.pairs * model.num_layers * model.num_heads * model.head_dim
