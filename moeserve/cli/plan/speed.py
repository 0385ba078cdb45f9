"""Predicts speed: a step's seconds, from the bytes that it reads, the operations that it computes, and fixed costs.

A step of n tokens reads the dense weights and the head once, and each expert to which any of its tokens is routed. If
each token is routed to k of a layer's E experts, all equally likely, these are E (1 - (1 - k/E)^n) experts; with a heat
file, the sum over the experts' own probabilities. Every token's products are computed. Reading and computing overlap,
but not completely:

    seconds = sqrt(reading^2 + computing^2) + attention + operations + step + rows

This fits measured steps of 1 to 512 tokens, both where one of the two is much shorter and where they are about equal
(docs/explanation/planner.md). `HybridSpeed` has the terms of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from moeserve.cli.plan.cache_forecast import CacheForecast, CacheUse
from moeserve.cli.plan.gpu_constants import H200, GpuConstants
from moeserve.cli.plan.rates import OPS_A_LAYER, CpuRates, GpuRates
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import (
    SMALL_BATCH_ROWS,
    UNPACK_ROWS,
    UNPACKED_EXPERTS_ROWS,
    step_sizes,
    unpacks_experts,
)
from moeserve.models.tensors import dense_tensors
from moeserve.placement import ModelSizes, Placement

# Shares of a rate that the engine reaches, measured on two Zen 5 cores with Q4_K_M. Weights are read at 79 to 93% of
# what reading alone reaches; norms, rotation and quantising take a tenth of the time of the products; attention
# multiplies at these shares of the experts' rate.
READ_SHARE = 0.85
PRODUCT_SHARE = 0.9
PREFILL_ATTENTION_SHARE = 0.27
DECODE_ATTENTION_SHARE = 0.063
SAMPLED_VALUES = 1.5e9  # logits per second in sampling with a temperature; greedy sampling is far faster


STREAMED_PARTS = [part / 10 for part in range(1, 11)]  # shares of the RAM experts that a plan tries to stream


@dataclass(frozen=True, slots=True)
class Step:
    """The contents of a step."""

    rows: int  # sequences
    tokens: int  # new tokens per sequence
    context: int  # positions before the new tokens, per sequence

    @property
    def all_tokens(self) -> int:
        return self.rows * self.tokens

    @property
    def pairs(self) -> int:
        """Returns the number of pairs of a token and a position that it attends to."""
        return self.rows * (self.tokens * self.context + self.tokens * (self.tokens + 1) // 2)


class CpuSpeed:
    """The speed of the CPU engine."""

    def __init__(
        self, model: ModelShape, sizes: ModelSizes, routing: RoutingProbabilities, rates: CpuRates
    ) -> None:
        self._model = model
        self._sizes = sizes
        self._routing = routing
        self._rates = rates
        self._is_cached = sizes.cpu_layer_bytes + sizes.head.cpu <= rates.cache_bytes

    def decode(self, streams: int, context: int) -> float:
        """Returns the tokens per second of all streams together."""
        return streams / self.seconds(Step(streams, 1, context))

    def prefill(self, tokens: int, step_tokens: int) -> float:
        """Returns the tokens per second of one prompt, in steps of at most `step_tokens`."""
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
        states = 2 * step.rows * self._sizes.state_bytes()  # read and written
        return (
            states
            + self._sizes.head.cpu
            + sum(
                layer.dense.cpu + float(self._routing.touched(index, tokens).sum()) * layer.expert.cpu
                for index, layer in enumerate(self._sizes.layers)
            )
        )

    def _dense_ops(self, step: Step) -> float:
        return 2.0 * (
            step.all_tokens * sum(dense_parameters(self._model, index) for index in self._layers)
            + step.rows * self._model.vocab_size * self._model.hidden_size
        )

    def _expert_ops(self, step: Step) -> float:
        return 2.0 * step.all_tokens * sum(expert_parameters(self._model, index) for index in self._layers)

    @property
    def _layers(self) -> range:
        return range(self._model.num_layers)


class HybridSpeed:
    """The speed of a GPU together with the CPU pool: both compute their experts of a layer at the same time. The first
    layers may be on the CPU only.

    A layer's time is the sum of the start of its kernels, its dense part, the longer of both sides' experts, and the
    hand-off between them. In a step of few rows, an expert's weights are read once for each route to it. (The rows that
    share an expert find its weights in the GPU's cache, which is hardly faster.) In a step of many rows, each expert is
    read once. That read is slow, because the weights are unpacked for the tensor cores, and the products are computed
    after it, not at the same time:

        few       bytes of routes / reading
        many      bytes of experts / reading + operations / rate
        unpacked  the same with more operations a second, for steps so large that weights are unpacked before products
    """

    def __init__(
        self,
        model: ModelShape,
        sizes: ModelSizes,
        routing: RoutingProbabilities,
        placement: Placement,
        cpu: CpuRates,
        gpu: GpuRates,
        constants: GpuConstants = H200,
        cache: CacheForecast | None = None,
    ) -> None:
        """cache: the forecast of the expert cache, if there is one."""
        self._model = model
        self._sizes = sizes
        self._routing = routing
        self._placement = placement
        self._cpu = cpu
        self._gpu = gpu
        self._constants = constants
        self._cache = cache
        self._dense_parameters = [dense_parameters(model, index) for index in range(model.num_layers)]

    def decode(self, streams: int, context: int, *, at_first: bool = False) -> float:
        """Returns the tokens per second of all streams together. at_first: at the beginning of texts, whose experts are
        not in the cache yet."""
        step = Step(streams, 1, context)
        in_ram = self._placement.layers_in_ram
        kv = streams * (context * self._sizes.kv_bytes(in_ram) + 2 * self._sizes.state_bytes(in_ram))
        beside = kv / (self._gpu.read * self._constants.dense_read)
        beside += self._cpu_attention_seconds(step, DECODE_ATTENTION_SHARE) + self._once(step)
        indices = range(self._model.num_layers)
        if (use := self._cache_use(streams, at_first=at_first)) is None:
            return streams / (beside + sum(self._layer_seconds(step, index) for index in indices))
        seconds = np.full(len(use.steps), beside)
        for index in indices:
            seconds += self._cached_layer_seconds(step, index, use)
        if not use.fetches:
            # Promotions run beside the step. Their reads from RAM lengthen it (docs/results/experts-in-ram.md), and it
            # takes at least as long as the copies over PCIe, which run one after another.
            seconds += use.promoted_bytes / self._cpu.read
            seconds = np.maximum(seconds, use.promoted_bytes / (self._gpu.pcie * self._constants.pcie))
        return streams / float(seconds.mean())

    def _cache_use(self, streams: int, *, at_first: bool) -> CacheUse | None:
        if self._cache is None:
            return None
        return (self._cache.at_first if at_first else self._cache.settled).get(streams)

    def prefill(self, tokens: int, step_tokens: int) -> float:
        """Returns the tokens per second of one prompt, in steps of at most `step_tokens`."""
        seconds = 0.0
        for start in range(0, tokens, step_tokens):
            step = Step(1, min(step_tokens, tokens - start), start)
            on_gpu = len(self._placement.gpu_layers) / self._model.num_layers
            seconds += on_gpu * self._gpu_attention_seconds(step)
            seconds += self._cpu_attention_seconds(step, PREFILL_ATTENTION_SHARE)
            seconds += self._once(step)
            seconds += sum(
                self._prefill_layer_seconds(step, index) for index in range(self._model.num_layers)
            )
        return tokens / seconds

    def _gpu_attention_seconds(self, step: Step) -> float:
        """Returns the seconds of a prompt chunk's attention in all layers. For a large step all work beside products is
        included."""
        c, ops = self._constants, attention_ops(self._model, step)
        if not _unpacks(step.all_tokens):
            return ops / (self._gpu.ops * c.ops)
        return ops / (self._gpu.ops * c.attention_ops) + c.row_s * step.all_tokens * self._model.num_layers

    def _once(self, step: Step) -> float:
        """Returns the seconds of a step that do not depend on its layers."""
        head_ops = 2.0 * step.rows * self._model.vocab_size * self._model.hidden_size
        head = self._product_seconds(self._sizes.head.cuda, head_ops, step.rows)
        return self._constants.step_s + head

    def _prefill_layer_seconds(self, step: Step, index: int) -> float:
        """Returns a layer's seconds. RAM experts are computed by the CPU, streamed, or some of them each way: whichever
        is fastest, as the engine's calibration chooses."""
        layer = self._placement.layers[index]
        if not layer.num_cpu_experts or layer.prefill == "cpu" or layer.dense == "cpu":
            return self._layer_seconds(step, index)
        if layer.prefill == "cuda":
            return self._streamed_seconds(step, index, [1.0])[0]
        return min(self._layer_seconds(step, index), *self._streamed_seconds(step, index, STREAMED_PARTS))

    def _streamed_seconds(self, step: Step, index: int, parts: Sequence[float]) -> list[float]:
        """Returns, for each of these parts of a layer's RAM experts, the seconds of the layer if that part is streamed:
        the longest of the copies, the GPU's work and the CPU's."""
        c, expert = self._constants, self._sizes.layers[index].expert
        in_ram = self._placement.layers[index].num_cpu_experts
        own = self._gpu_experts_seconds(step, index, everything=False)
        others = self._gpu_experts_seconds(step, index, everything=True) - own
        dense = self._dense_seconds(step, index)
        computed = self._ram_experts_seconds(step, index)

        def seconds(part: float) -> float:
            streamed = part * in_ram * expert.cpu
            on_gpu = streamed / (self._gpu.read * c.unpack) + dense + own + part * others
            left = (1.0 - part) * computed
            on_cpu = dense + left + c.handoff_s if left else 0.0
            return max(streamed / (self._gpu.pcie * c.pcie), on_gpu, on_cpu)

        return [seconds(part) for part in parts]

    def _layer_seconds(self, step: Step, index: int) -> float:
        layer = self._placement.layers[index]
        in_ram = self._ram_experts_seconds(step, index)
        if layer.dense == "cpu":
            sizes, ops = self._sizes.layers[index], self._dense_ops(step, index)
            dense = self._cpu_seconds(sizes.dense.cpu, ops, self._cpu.dense_ops)
            return dense + in_ram + OPS_A_LAYER * self._cpu.op_s
        handoff = self._constants.handoff_s if layer.num_cpu_experts else 0.0
        on_gpu = self._gpu_experts_seconds(step, index, everything=False)
        return self._dense_seconds(step, index) + max(on_gpu, in_ram) + handoff

    def _cached_layer_seconds(self, step: Step, index: int, use: CacheUse) -> npt.NDArray[np.float64]:
        """Returns the seconds of a layer in each step: [steps]. They are computed per step, not from an average,
        because a layer waits for the slower side, and many steps have no miss while others have some."""
        if not self._placement.layers[index].is_cached:
            return np.full(len(use.steps), self._layer_seconds(step, index))
        c, expert = self._constants, self._sizes.layers[index].expert
        routes = step.all_tokens * self._model.layers[index].num_routes
        ops = self._expert_ops(step, index)
        used = np.array([of.used[index] for of in use.steps], np.float64)
        missed = np.array([of.missed[index] for of in use.steps], np.float64)
        found = 1.0 - missed / np.maximum(used, 1.0)  # of the routes
        read = routes if step.all_tokens <= SMALL_BATCH_ROWS else used
        on_gpu = found * read * expert.cuda / (self._gpu.read * c.route_read)
        # Copies that fetch experts take the bandwidth that the pool leaves.
        reading = missed * expert.cpu / (self._cpu.read * (1.0 if use.fetches else c.ram_read))
        in_ram = np.hypot(reading, (1.0 - found) * ops / (self._cpu.expert_ops * PRODUCT_SHARE))
        handoff = np.where(missed > 0, c.handoff_s, c.idle_handoff_s)
        if use.fetches:
            # They are complete before the GPU computes its own.
            fetched = np.array([of.promoted[index] for of in use.steps], np.float64)
            on_gpu = on_gpu + fetched * expert.cpu / (self._gpu.pcie * c.pcie)
            handoff = handoff + c.fetch_s
        seconds: npt.NDArray[np.float64] = (
            self._dense_seconds(step, index) + np.maximum(on_gpu, in_ram) + handoff
        )
        return seconds

    def _dense_seconds(self, step: Step, index: int) -> float:
        """Returns the seconds of a layer's dense part on the GPU, including the start of the layer's kernels."""
        nbytes = self._sizes.layers[index].dense.cuda
        return self._constants.layer_s + self._product_seconds(
            nbytes, self._dense_ops(step, index), step.all_tokens
        )

    def _gpu_experts_seconds(self, step: Step, index: int, *, everything: bool) -> float:
        """Returns the seconds of the layer's experts on the GPU; `everything`: of all its experts, as if all were
        there."""
        layer = self._placement.layers[index]
        experts = range(layer.num_experts) if everything else layer.gpu_experts
        if not experts:
            return 0.0
        expert, tokens, c = self._sizes.layers[index].expert, step.all_tokens, self._constants
        share = self._routing.share(index, experts)  # of the routes
        if tokens <= SMALL_BATCH_ROWS:
            routes = share * tokens * self._model.layers[index].num_routes
            return routes * expert.cuda / (self._gpu.read * c.route_read)
        touched = float(self._routing.touched(index, tokens)[list(experts)].sum())
        rows, routes = step_sizes(tokens)[-1], self._model.layers[index].num_routes
        ops = share * self._expert_ops(step, index)
        if rows > UNPACKED_EXPERTS_ROWS and index in self._placement.unpacked_layers:
            return ops / (self._gpu.ops * c.unpacked_ops)
        can_unpack = unpacks_experts(rows, routes, layer.num_experts)
        return self._product_seconds(touched * expert.cuda, ops, tokens, can_unpack=can_unpack)

    def _ram_experts_seconds(self, step: Step, index: int) -> float:
        layer, sizes = self._placement.layers[index], self._sizes.layers[index]
        touched = self._routing.touched(index, step.all_tokens)
        in_ram = float(touched.sum()) - float(touched[list(layer.gpu_experts)].sum())
        share = 1.0 - self._routing.share(index, layer.gpu_experts)
        return self._cpu_seconds(
            in_ram * sizes.expert.cpu, share * self._expert_ops(step, index), self._cpu.expert_ops
        )

    def _dense_ops(self, step: Step, index: int) -> float:
        return 2.0 * step.all_tokens * self._dense_parameters[index]

    def _expert_ops(self, step: Step, index: int) -> float:
        return 2.0 * step.all_tokens * expert_parameters(self._model, index)

    def _cpu_attention_seconds(self, step: Step, share: float) -> float:
        """Returns the seconds of attention in the layers in RAM."""
        in_ram = self._placement.layers_in_ram / self._model.num_layers
        return in_ram * attention_ops(self._model, step) / (share * self._cpu.expert_ops)

    def _cpu_seconds(self, nbytes: float, ops: float, rate: float) -> float:
        return math.hypot(nbytes / (self._cpu.read * self._constants.ram_read), ops / (rate * PRODUCT_SHARE))

    def _product_seconds(self, nbytes: float, ops: float, rows: int, *, can_unpack: bool = True) -> float:
        """Returns the seconds of products with matrices on the GPU, each read once. can_unpack: large steps unpack
        these matrices first."""
        c, gpu = self._constants, self._gpu
        if rows <= SMALL_BATCH_ROWS:
            return nbytes / (gpu.read * c.dense_read)
        if can_unpack and _unpacks(rows):
            return nbytes / (gpu.read * c.unpack_read) + ops / (gpu.ops * c.unpacked_ops)
        return nbytes / (gpu.read * c.many_read) + ops / (gpu.ops * c.ops)


def _unpacks(rows: int) -> bool:
    return step_sizes(rows)[-1] > UNPACK_ROWS


def dense_parameters(model: ModelShape, layer: int) -> int:
    """Returns the number of parameters of a layer outside its routed experts."""
    return sum(prod(shape) for shape in dense_tensors(model, layer).values() if len(shape) > 1)


def expert_parameters(model: ModelShape, layer: int) -> int:
    """Returns the number of parameters of a layer's experts to which one token is routed."""
    moe = model.layers[layer].moe
    return (
        0 if moe is None else moe.top_k * len(set(moe.parts)) * (moe.latent or model.hidden_size) * moe.width
    )


def attention_ops(model: ModelShape, step: Step) -> float:
    """Returns the number of operations of a step's attention: two products for each pair of a token and a position
    that it attends to, in each head of each layer; in a recurrent layer eight operations per token for each number of
    its state."""
    attending = sum(layer.attention.attended_values for layer in model.layers if layer.attention is not None)
    recurrent = sum(
        layer.recurrence.heads.delta_values for layer in model.layers if layer.recurrence is not None
    )
    return 2.0 * step.pairs * attending + 8.0 * step.all_tokens * recurrent
