"""Plans a model that is divided among several GPUs: the memory on each GPU, and the speed.

Each GPU's share is placed as the server places it, and its speed is predicted like that of a whole model. If GPUs have
whole layers, a step takes the sum of all shares' times, and each further part of the step adds the longest share's
time. If layers are divided, a step takes the slowest share's time, plus two sums per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moeserve.cli.plan.gpu_constants import H200
from moeserve.cli.plan.memory import usable_gpu_bytes
from moeserve.cli.plan.rates import CpuRates, GpuRates
from moeserve.cli.plan.report import Speed
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.speed import HybridSpeed
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import layout_of
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.ranks.rank_share import RankShare, why_undivided
from moeserve.models.ranks.rank_source import RankSource
from moeserve.models.sources.source import ModelSource
from moeserve.placement import Gpu, ModelSizes, Placement
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES, gpu_reserved_bytes
from moeserve.placement.group import place_share, share_among, share_sizes
from moeserve.placement.options import heat_counts
from moeserve.placement.sizes import has_float_weights
from moeserve.placement.step_tokens import step_tokens

# Measured between two H200s joined by NVLink: docs/results/several-gpus.md.
SUM_S = 2.0e-6  # seconds of a sum of few numbers
SUM_BYTES_PER_S = 230e9
# Of few rows' experts, when they are divided: a GPU reads its routes' at this share of its rate, where one that has all
# routes reaches `GpuConstants.route_read`. Half of the routes are half of the programs, which leave multiprocessors
# idle, and in each layer the GPU that has more routes is waited for. Fitted to the steps of 1 and 8 streams of two
# shapes: docs/results/planner.md.
DIVIDED_ROUTE_READ = 0.46
PASS_S = 12e-6  # seconds of passing rows to the next GPU: a copy, a signal, the wait for it
PARTS = (1, 2, 4, 8)  # of a step with prompts, if GPUs have whole layers
DECODE_PARTS = (1, 2)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The plan for one GPU."""

    share: RankShare
    sizes: ModelSizes
    placement: Placement
    reserved: int  # bytes: buffers and CUDA

    @property
    def kv_tokens(self) -> int:
        assert self.placement.kv_tokens is not None
        return self.placement.kv_tokens


@dataclass(frozen=True, slots=True)
class GroupPlan:
    parallel: str
    gpu_memory: int  # bytes per GPU
    ram: int  # bytes that there are
    step_tokens: int
    gpus: list[GpuPlan]
    kv_tokens: int
    speed: Speed


def plan_group(
    config: ServerConfig, source: ModelSource, model: ModelShape, gpu: int, ram: int, num_gpus: int
) -> list[GpuPlan]:
    """Plans each GPU's share. gpu: bytes of each GPU; ram: bytes of the machine. Raises ConfigError if the server
    would."""
    counts = heat_counts(config, model)
    usable = usable_gpu_bytes(config, gpu)
    config = replace(config, parallel=parallel_of(config, model, num_gpus))
    plans = []
    for rank in range(num_gpus):
        share = share_among(config, model, source.tensors, rank, num_gpus, counts)
        own = RankSource(source, share)
        layout = layout_of(config, share.shape)
        rows = max(step_tokens(config.max_num_batched_tokens, share.shape, usable), config.max_num_seqs)
        sizes = share_sizes(ModelSizes.of(own.tensors, layout), share)
        reserved = gpu_reserved_bytes(
            config,
            share.shape,
            rows,
            sizes,
            usable,
            float_weights=has_float_weights(own.tensors, share.shape),
        )
        if share.is_stage:
            reserved += 4 * rows * model.hidden_size  # rows received from the previous GPU
        room = Gpu(gpu - CUDA_CONTEXT_BYTES, reserved)
        placement = place_share(config, sizes, share.shape, room, share, counts, ram)
        plans.append(GpuPlan(share, sizes, placement, reserved + CUDA_CONTEXT_BYTES))
    needed = sum(plan.placement.cpu_weight_bytes for plan in plans)
    if needed > ram:
        raise ConfigError(
            f"{needed / GIB:.2f} GiB of experts do not fit the GPUs and {ram / GIB:.2f} GiB of RAM are there: use more "
            "GPUs, or choose a smaller model or quantisation"
        )
    return plans


def parallel_of(config: ServerConfig, model: ModelShape, num_gpus: int) -> str:
    """Returns the way in which the server would divide the model, if the GPUs can access one another's memory."""
    if config.parallel != "auto":
        return config.parallel
    return "layers" if why_undivided(model, num_gpus) else "tensor"


class GroupSpeed:
    """The predicted speed, computed from that of each share."""

    def __init__(
        self,
        plans: Sequence[GpuPlan],
        counts: Sequence[Sequence[int]] | None,
        cpu: CpuRates,
        gpu: GpuRates,
    ) -> None:
        """cpu: rates of all cores, which the GPUs' pools share."""
        own = replace(
            cpu,
            read=cpu.read / len(plans),
            dense_ops=cpu.dense_ops / len(plans),
            expert_ops=cpu.expert_ops / len(plans),
        )
        self._is_staged = plans[0].share.is_stage
        self._has_ram = any(plan.placement.shares_layers for plan in plans)
        self._hidden = plans[0].share.shape.hidden_size
        self._layers = plans[0].share.shape.num_layers
        self._speeds = [_speed_of(plan, counts, own, gpu) for plan in plans]

    def decode(self, streams: int, context: int) -> float:
        """Tokens a second of all streams together."""

        def seconds(parts: int) -> list[float]:
            rows = -(-streams // parts)
            return [rows / speed.decode(rows, context) for speed in self._speeds]

        possible = [parts for parts in DECODE_PARTS if parts <= streams]
        return streams / self._fastest(seconds, possible, streams)

    def prefill(self, tokens: int, in_a_step: int) -> float:
        """Returns the tokens per second of one prompt, in steps of at most `in_a_step`."""
        total = 0.0
        for start in range(0, tokens, in_a_step):
            step = min(in_a_step, tokens - start)

            def seconds(parts: int, step: int = step) -> list[float]:
                rows = -(-step // parts)
                return [rows / speed.prefill(rows, rows) for speed in self._speeds]

            total += self._fastest(seconds, PARTS, step)
        return tokens / total

    def _fastest(self, seconds: Callable[[int], list[float]], parts: Sequence[int], rows: int) -> float:
        """Returns the seconds of a step of `rows` rows, divided into the fastest number of parts. seconds: returns the
        seconds of each GPU for one part, given the number of parts."""
        if not self._is_staged:
            numbers = rows * self._hidden
            nbytes = numbers * (2 if rows > 64 else 4)
            return max(seconds(1)) + 2 * self._layers * (SUM_S + nbytes / SUM_BYTES_PER_S)
        passes = len(self._speeds) * (PASS_S + rows * self._hidden * 4 / SUM_BYTES_PER_S)
        ways = [1] if self._has_ram else parts
        return passes + min(sum(taken := seconds(each)) + (each - 1) * max(taken) for each in ways)


def _speed_of(
    plan: GpuPlan, counts: Sequence[Sequence[int]] | None, cpu: CpuRates, gpu: GpuRates
) -> HybridSpeed:
    """Returns the speed of a share as if it were a model of its own, with the share's experts and their routes."""
    share, shape, constants = plan.share, plan.share.shape, H200
    if share.is_stage:
        shape = replace(shape, vocab_size=shape.vocab_size if share.rank == 0 else 1)
    else:
        shape = replace(
            shape,
            layers=tuple(
                _with_experts(layer, len(ids), share.num_ranks)
                for layer, ids in zip(shape.layers, share.experts, strict=True)
            ),
        )
        constants = replace(constants, route_read=DIVIDED_ROUTE_READ)
    routing = RoutingProbabilities(shape, None if counts is None else share.counts_of(counts))
    return HybridSpeed(shape, plan.sizes, routing, plan.placement, cpu, gpu, constants)


def _with_experts(layer: LayerShape, count: int, num_ranks: int) -> LayerShape:
    if layer.moe is None:
        return layer
    routes = max(1, round(layer.moe.top_k / num_ranks))
    return replace(layer, ffn=replace(layer.moe, num_experts=count, top_k=routes))


# ---------------------------------------------------------------- the report


def as_text(plan: GroupPlan, head: str, command: str, cautions: Sequence[str]) -> str:
    lines = [_gpu_line(at, gpu) for at, gpu in enumerate(plan.gpus)]
    prefill = [f"  prompt of {n:,}: {rate:,.0f} tokens/s" for n, rate in plan.speed.prefill.items()]
    decode = [f"  {n} at once: {rate:,.1f} tokens/s together" for n, rate in plan.speed.decode.items()]
    in_ram = sum(gpu.placement.cpu_weight_bytes for gpu in plan.gpus)
    return "\n".join(
        [
            head,
            "",
            f"{len(plan.gpus)} GPUs of {plan.gpu_memory / GIB:.1f} GiB, --parallel {plan.parallel}",
            *lines,
            f"  RAM, experts: {in_ram / GIB:.2f} GiB of {plan.ram / GIB:.1f} free",
            "",
            f"KV: {plan.kv_tokens:,} tokens; a step: {plan.step_tokens:,} tokens at most",
            "",
            f"Speed ({plan.speed.context:,} tokens of context)",
            *prefill,
            *decode,
            *(f"\ncaution: {text}" for text in cautions),
            "",
            f"To serve it so:\n\n    {command}",
        ]
    )


def _gpu_line(number: int, gpu: GpuPlan) -> str:
    share, placed = gpu.share, gpu.placement
    first, count = share.first_layer, share.shape.num_layers
    here = placed.num_gpu_experts
    total = sum(len(ids) for ids in share.experts)
    layers = f"layers {first} to {first + count - 1}" if share.is_stage else f"its part of {count} layers"
    experts = f"{here:,} of its {total:,} experts" if here < total else f"all of its {total:,} experts"
    return (
        f"  GPU {number}: {layers}, {experts}: {placed.gpu_weight_bytes / GIB:.2f} GiB of weights, "
        f"{(gpu.reserved + placed.stream_bytes) / GIB:.2f} of buffers, room for {gpu.kv_tokens:,} tokens of KV"
    )


def as_json(plan: GroupPlan, command: str, cautions: Sequence[str]) -> dict[str, object]:
    return {
        "parallel": plan.parallel,
        "gpu_memory": plan.gpu_memory,
        "ram": plan.ram,
        "step_tokens": plan.step_tokens,
        "kv_tokens": plan.kv_tokens,
        "gpus": [
            {
                "first_layer": gpu.share.first_layer,
                "layers": gpu.share.shape.num_layers,
                "gpu_experts": [
                    [ids[place] for place in layer.gpu_experts]
                    for ids, layer in zip(gpu.share.experts, gpu.placement.layers, strict=True)
                ],
                "gpu_weights": gpu.placement.gpu_weight_bytes,
                "ram_weights": gpu.placement.cpu_weight_bytes,
                "reserved": gpu.reserved,
                "kv_tokens": gpu.kv_tokens,
            }
            for gpu in plan.gpus
        ],
        "speed": {
            "prefill": plan.speed.prefill,
            "decode": plan.speed.decode,
            "context": plan.speed.context,
        },
        "command": command,
        "cautions": list(cautions),
    }
