"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from moeserve.cli.plan.memory import Memory
from moeserve.cli.plan.rates import CpuRates, GpuRates
from moeserve.cli.plan.tiers import TierForecast
from moeserve.config.units import GIB, MIB
from moeserve.messages.pages import Tier
from moeserve.models.interface import ModelShape
from moeserve.models.skipped_layers import skipped_layers
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import unloaded_tensors
from moeserve.placement import Placement
from moeserve.placement.expert_cache.replay import SETTLING_STEPS
from moeserve.placement.sizes import plane_bytes


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted tokens a second."""

    prefill: dict[int, float]  # by prompt length
    decode: dict[int, float]  # by the number of streams; all streams together
    context: int  # tokens before the decoded ones
    # Of the expert cache or of experts on disk, by the number of streams; empty: there is neither.
    hit_rates: dict[int, float] = field(default_factory=dict)
    # During the first SETTLING_STEPS tokens of texts, whose experts are not in the cache yet.
    decode_at_first: dict[int, float] = field(default_factory=dict)
    hit_rates_at_first: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    model: ModelShape
    gguf: ModelSource
    placement: Placement
    memory: Memory
    step_tokens: int  # at most
    ram: int  # bytes of the machine
    gpu: int | None  # bytes of the GPU; None: no GPU
    users: dict[int, int]  # the number of users at once, by tokens per user
    cpu_rates: CpuRates
    gpu_rates: GpuRates | None
    speed: Speed
    tiers: dict[Tier, TierForecast]
    command: str
    cautions: list[str]


def as_json(plan: PlacementPlan) -> dict[str, Any]:
    return {
        "model": asdict(plan.model),
        "file_bytes": sum(tensor.nbytes for tensor in plan.gguf.tensors.values()),
        "skipped_layers": asdict(skipped_layers(plan.model, plan.gguf)),
        "tensors": {name: where for name, _, where in tensors(plan)},
        "gpu_experts": [list(layer.gpu_experts) for layer in plan.placement.layers],
        "memory": asdict(plan.memory)
        | {"ram_start": plan.memory.ram_start, "ram_full": plan.memory.ram_full, "gpu": plan.memory.gpu},
        "ram": plan.ram,
        "gpu_memory": plan.gpu,
        "step_tokens": plan.step_tokens,
        "users": plan.users,
        "rates": {
            "cpu": asdict(plan.cpu_rates),
            "gpu": None if plan.gpu_rates is None else asdict(plan.gpu_rates),
        },
        "speed": asdict(plan.speed),
        "tiers": {name: asdict(tier) for name, tier in plan.tiers.items()},
        "command": plan.command,
        "cautions": plan.cautions,
    }


def as_text(plan: PlacementPlan, *, verbose: bool) -> str:
    sections = [_head(plan), _where(plan), _memory(plan), _capacity(plan), _speed(plan)]
    if verbose:
        sections.insert(2, _every_tensor(plan))
    sections += [f"caution: {text}" for text in plan.cautions]
    sections.append(f"To serve it so:\n\n    {plan.command}")
    return "\n\n".join(sections)


def tensors(plan: PlacementPlan) -> Iterator[tuple[str, int, str]]:
    """(name, bytes where they lie, where) in the file's order."""
    for name, tensor in plan.gguf.tensors.items():
        where, on_gpu = _place_of(plan, name)
        total, in_planes = tensor.nbytes, plane_bytes(tensor)
        yield name, int(total * (1 - on_gpu) + in_planes * on_gpu), where


def _place_of(plan: PlacementPlan, name: str) -> tuple[str, float]:
    """Returns where a tensor goes, and which share of it is on the GPU."""
    placement = plan.placement
    if name in unloaded_tensors(plan.model):
        return "disk", 0.0
    parts = name.split(".")
    if parts[0] != "blk":
        where = placement.embedding if name == n.TOKEN_EMBD else placement.head
        return where, float(where == "cuda")
    if int(parts[1]) >= len(placement.layers):
        return "not loaded", 0.0
    layer = placement.layers[int(parts[1])]
    if parts[2] not in n.EXPERT_PARTS:
        return layer.dense, float(layer.dense == "cuda")
    count, total = len(layer.gpu_experts), layer.num_experts
    if count in (0, total):
        return ("cuda" if count else "cpu"), float(bool(count))
    return f"cuda: {count} of {total} experts, cpu: the rest", count / total


# ---------------------------------------------------------------- text


def _head(plan: PlacementPlan) -> str:
    m = plan.model
    size = sum(tensor.nbytes for tensor in plan.gguf.tensors.values())
    dense = m.num_layers - len(m.moe_layers)
    experts = f" of {m.num_experts} experts, {m.top_k} a token" if m.moe_layers else ""
    without = f", {dense} without experts" if m.moe_layers and dense else ""
    mtp = skipped_layers(m, plan.gguf)
    skipped = (
        f", {mtp.count} for further tokens (MTP) not loaded ({_gib(mtp.num_bytes)})" if mtp.count else ""
    )
    return (
        f"{plan.gguf.path.name}: {_gib(size)} of tensors, {m.num_layers} layers{experts}{without}{skipped}, context "
        f"{m.context_length:,}"
    )


def _where(plan: PlacementPlan) -> str:
    placement = plan.placement
    lines = [_row("embedding", placement.embedding), _row("head", placement.head)]
    groups: list[tuple[int, int, str]] = []  # runs of equal layers: (first, last, text)
    for index, layer in enumerate(placement.layers):
        count = len(layer.gpu_experts)
        experts = f"{count} of {layer.num_experts} experts on cuda" if count else "experts on cpu"
        if layer.is_cached:
            experts += ", following the text"
        prefill = {"auto": "", "cpu": ", never streamed", "cuda": ", streamed for every prompt"}[
            layer.prefill
        ]
        text = f"attention and router on {layer.dense}, {experts}"
        if not layer.num_experts:
            text = f"attention and feed-forward on {layer.dense}"
        elif plan.gpu is not None and layer.num_cpu_experts and layer.dense == "cuda":
            text += prefill
        if groups and groups[-1][2] == text:
            groups[-1] = (groups[-1][0], index, text)
        else:
            groups.append((index, index, text))
    lines += [_row(f"layers {a} to {b}" if a < b else f"layer {a}", text) for a, b, text in groups]
    return "\n".join(["Where", *lines])


def _every_tensor(plan: PlacementPlan) -> str:
    lines = [f"  {name:<32}{nbytes / MIB:>10.1f} MiB  {where}" for name, nbytes, where in tensors(plan)]
    return "\n".join(["Tensors", *lines])


def _memory(plan: PlacementPlan) -> str:
    m = plan.memory
    lines = [
        _row("RAM, weights", _gib(m.ram_weights)),
        _row("RAM, processes and buffers", _gib(m.ram_other)),
        *([_row("RAM, model that drafts", _gib(m.ram_draft_model))] if m.ram_draft_model else []),
        *([_row("RAM, vision tower", _gib(m.ram_tower))] if m.ram_tower else []),
        *([_row("RAM, pictures' embeddings when full", _gib(m.ram_images))] if m.ram_images else []),
        *([_row("RAM, LoRA adapters", _gib(m.ram_adapters))] if m.ram_adapters else []),
        *([_row("RAM, kept for adapters", _gib(m.ram_later_adapters))] if m.ram_later_adapters else []),
        _row("RAM, KV when full", _gib(m.ram_kv)),
        *([_row("RAM, recurrent states", _gib(m.ram_states))] if m.ram_states else []),
        *([_row("RAM, prefix cache when full", _gib(m.ram_tier))] if m.ram_tier else []),
        _row(
            "RAM together",
            f"{_gib(m.ram_start)} at first, {_gib(m.ram_full)} with the KV full; {_gib(plan.ram)} free",
        ),
    ]
    if on_disk := sum(plan.gguf.tensors[name].nbytes for name in unloaded_tensors(plan.model)):
        lines.append(_row("disk, n-gram table", _gib(on_disk)))
    if plan.gpu is not None:
        lines += [
            _row("GPU, weights", _gib(m.gpu_weights)),
            _row("GPU, KV", _gib(m.gpu_kv)),
            *([_row("GPU, recurrent states", _gib(m.gpu_states))] if m.gpu_states else []),
            _row("GPU, streamed experts", _gib(m.gpu_stream)),
            *([_row("GPU, unpacked experts", _gib(m.gpu_unpacked))] if m.gpu_unpacked else []),
            *([_row("GPU, LoRA adapters", _gib(m.gpu_adapters))] if m.gpu_adapters else []),
            *([_row("GPU, vision tower", _gib(m.gpu_tower))] if m.gpu_tower else []),
            _row("GPU, buffers and CUDA", _gib(m.gpu_other)),
            _row("GPU together", f"{_gib(m.gpu)} of {_gib(plan.gpu)}"),
        ]
    return "\n".join(["Memory", *lines])


def _capacity(plan: PlacementPlan) -> str:
    users = ", ".join(f"{count} of {tokens:,} tokens" for tokens, count in plan.users.items())
    return "\n".join(
        [
            "Capacity",
            _row("KV", f"{plan.memory.kv_tokens:,} tokens, {plan.memory.max_model_len:,} at most a request"),
            *(
                [_row("KV, windowed layers", f"{windows:,} tokens")]
                if (windows := plan.memory.window_slots)
                else []
            ),
            _row("users at once", users),
            _row("a step", f"{plan.step_tokens:,} tokens at most"),
            *[line for name, tier in plan.tiers.items() for line in _tier(name, tier)],
        ]
    )


def _tier(name: Tier, tier: TierForecast) -> list[str]:
    where = "in RAM" if name == "ram" else "on disk"
    states = f", less {tier.state_bytes / MIB:,.0f} MiB a state" if tier.state_bytes else ""
    long = f"{tier.prompt:,} tokens in {tier.load_s:.2f} s ({tier.tokens_per_s:,.0f} tokens/s), computed in"
    return [
        _row(where, f"{tier.tokens:,} tokens in {_gib(tier.num_bytes)}{states}"),
        _row(f"a prompt from {'RAM' if name == 'ram' else 'disk'}", f"{long} {tier.compute_s:,.1f} s"),
    ]


def _speed(plan: PlacementPlan) -> str:
    cpu, gpu = plan.cpu_rates, plan.gpu_rates
    machine = f"CPU {cpu.read / 1e9:.0f} GB/s, {cpu.expert_ops / 1e9:,.0f} Gop/s"
    if gpu is not None:
        machine += f"; GPU {gpu.read / 1e9:,.0f} GB/s, {gpu.ops / 1e12:.0f} Top/s, {gpu.pcie / 1e9:.0f} GB/s from RAM"
    prefill = [
        _row(f"prompt of {tokens:,}", f"{rate:,.0f} tokens/s") for tokens, rate in plan.speed.prefill.items()
    ]
    decode = [
        _row(
            f"{streams} at once" if streams > 1 else "one answer",
            f"{rate:,.1f} tokens/s{' together' if streams > 1 else ''}{_found(plan, streams)}",
        )
        for streams, rate in plan.speed.decode.items()
    ]
    return "\n".join([f"Speed ({machine}; {plan.speed.context:,} tokens of context)", *prefill, *decode])


def _found(plan: PlacementPlan, streams: int) -> str:
    speed = plan.speed
    if streams not in speed.hit_rates:
        return ""
    whose = "their" if streams > 1 else "its"
    where = "in RAM" if plan.gpu is None else "on the GPU"
    first = f"{speed.decode_at_first[streams]:,.1f} over the first {SETTLING_STEPS} of a text"
    return f", {speed.hit_rates[streams]:.0%} of {whose} experts found {where}; {first}"


def _row(name: str, text: str) -> str:
    return f"  {name:<28}{text}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
