"""From a configuration to a GpuRunner: memory planned, weights, KV pool, recorded decode steps."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import Engine
from moeserve.kernels.cpu_stream import CpuStream, KvLayer
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.cpu_experts import ExpertsInRam, load_cpu_experts
from moeserve.models.qwen3moe.expert_stream import ExpertStream
from moeserve.models.qwen3moe.gpu_model import GpuQwen3Moe
from moeserve.models.qwen3moe.gpu_room import step_sizes
from moeserve.models.qwen3moe.gpu_weights import GpuLoader
from moeserve.models.qwen3moe.model import Qwen3Moe
from moeserve.models.qwen3moe.weights import Progress, WeightLoader, Weights
from moeserve.models.source import ModelSource
from moeserve.placement import Placement
from moeserve.placement.heat import read_heat
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.calibration import Streaming
from moeserve.worker.constraints import Constraints
from moeserve.worker.cpu_stream import check_ram, open_stream
from moeserve.worker.first_layers import FirstLayers
from moeserve.worker.gpu_memory import plan_placement, step_tokens_on
from moeserve.worker.gpu_runner import GpuRunner
from moeserve.worker.kv_pool import SHARE_OF_FREE_MEMORY, Capacity, KvRoom, bytes_per_token, plan_capacity
from moeserve.worker.kv_pool import allocate as allocate_in_ram
from moeserve.worker.memory import available_bytes
from moeserve.worker.ready import ready_message
from moeserve.worker.step_dump import open_dump

log = logging.getLogger(__name__)

LANES = 32
HANG_SECONDS = (
    180.0  # a step that stands still for so long has failed; the first ones compile kernels on the way
)


def load_gpu_runner(
    config: ServerConfig,
    gguf: ModelSource,
    on_progress: Progress,
    device: torch.device,
) -> GpuRunner:
    """Loads the model and allocates everything a step needs. Raises GGUFError for a bad file, ConfigError where the
    GPU's memory does not suffice."""
    if config.weight_layout == "file":
        raise ConfigError("--weight-layout file is for the CPU alone; leave it out, or choose --device cpu")
    # Its helper thread builds the vocabulary while this one loads the weights.
    constraints = Constraints(config.max_num_seqs, lambda: Engine(TextTokenizer.from_gguf(gguf)))
    model_config = Qwen3MoeConfig.from_gguf(gguf)
    model_config.check_tensors(gguf)
    _check_lanes(gguf, model_config)
    in_a_step = step_tokens_on(device, config, model_config)
    max_tokens = max(in_a_step, config.max_num_seqs)
    dump = open_dump(config, model_config, max_tokens)
    placement = plan_placement(config, model_config, gguf, max_tokens, device)
    weights = GpuLoader(gguf, model_config, device, on_progress).load(
        [layer.gpu_experts for layer in placement.gpu_layers],
        placement.layers_in_ram,
        with_embedding=not placement.begins_in_ram,
    )
    in_ram = _in_ram(config, model_config, gguf, placement, device, on_progress)
    _empty_cache(device)
    capacity = plan_capacity(config, model_config, _kv_rooms(placement, model_config))
    first_layers = _first_layers(in_ram, model_config, placement, capacity, max_tokens, device)
    slot_table = torch.zeros(
        config.max_num_seqs + 1, capacity.max_model_len, dtype=torch.int32, device=device
    )
    experts = None if in_ram is None else in_ram.experts
    model = GpuQwen3Moe(
        model_config,
        weights,
        allocate(model_config, capacity.num_slots, len(weights.layers), device),
        slot_table,
        max_tokens=max_tokens,
        max_model_len=capacity.max_model_len,
        handoff=None if experts is None else _handoff(config, experts, model_config, max_tokens, device),
        expert_stream=None if experts is None else _expert_stream(experts, placement, device),
        prefill=[layer.prefill for layer in placement.gpu_layers],
        from_cpu=None if first_layers is None else first_layers.x,
    )
    weight_bytes = placement.gpu_weight_bytes + placement.cpu_weight_bytes
    name = _device(placement, device, in_ram)
    ready = ready_message(config, model_config, capacity, weight_bytes, name, in_a_step)
    runner = GpuRunner(model, slot_table, ready, constraints, experts, first_layers, dump)
    runner.record()
    if model.can_stream:
        _choose_streaming(runner, config.gpu_prefill_token_threshold)
    return runner


def _choose_streaming(runner: GpuRunner, threshold: int | None) -> None:
    if threshold is None:
        runner.calibrate()
    else:
        runner.stream_by(Streaming.from_tokens(threshold), f"streamed to steps of {threshold} tokens on")


@dataclass(frozen=True, slots=True)
class InRam:
    """What the GPU has no room for, on the pool's stream."""

    stream: CpuStream
    first_layers: Weights | None  # None: the GPU begins with the embedding
    experts: ExpertsInRam | None  # of the GPU's layers; None: all are there


def _in_ram(
    config: ServerConfig,
    model_config: Qwen3MoeConfig,
    gguf: ModelSource,
    placement: Placement,
    device: torch.device,
    on_progress: Progress,
) -> InRam | None:
    if not placement.begins_in_ram and not placement.shares_layers:
        return None
    check_ram(placement.cpu_weight_bytes)
    stream = open_stream(config)
    count = placement.layers_in_ram
    first = None
    if placement.begins_in_ram:
        first = WeightLoader(stream, gguf, model_config, on_progress).load_first(count)
    experts = None
    if placement.shares_layers:
        ids = in_ram_order(config, placement)
        experts = load_cpu_experts(stream, gguf, ids, device, on_progress, first_layer=count)
    return InRam(stream, first, experts)


def _kv_rooms(placement: Placement, model: Qwen3MoeConfig) -> list[KvRoom]:
    """A token's KV lies where its layers are."""
    assert placement.kv_tokens is not None
    in_ram, on_gpu = placement.layers_in_ram, len(placement.gpu_layers)
    rooms = [KvRoom("GPU memory", placement.kv_tokens * bytes_per_token(model, on_gpu), on_gpu)]
    if in_ram:
        rooms.append(KvRoom("memory", available_bytes(), in_ram, SHARE_OF_FREE_MEMORY))
    return rooms


def _first_layers(
    in_ram: InRam | None,
    c: Qwen3MoeConfig,
    placement: Placement,
    capacity: Capacity,
    max_tokens: int,
    device: torch.device,
) -> FirstLayers | None:
    if in_ram is None or in_ram.first_layers is None:
        return None
    model = Qwen3Moe(
        c,
        in_ram.first_layers,
        in_ram.stream,
        allocate_in_ram(c, capacity.num_slots, placement.layers_in_ram),
        step_sizes(max_tokens)[-1],
        capacity.max_model_len,
        pinned=device.type == "cuda",
    )
    return FirstLayers(in_ram.stream, model)


def in_ram_order(config: ServerConfig, placement: Placement) -> list[list[int]]:
    """The experts in RAM of each layer on the GPU, the hottest first where that is known: a step that streams some of
    them takes the first, which costs the same whatever their rows, and the CPU's time grows with the rows."""
    first, count = placement.layers_in_ram, len(placement.layers)
    ids = [placement.cpu_experts(index) for index in range(first, count)]
    if config.expert_heat is None:
        return [list(own) for own in ids]
    counts = read_heat(Path(config.expert_heat), count, placement.num_experts).counts[first:]
    return [sorted(own, key=of.__getitem__, reverse=True) for own, of in zip(ids, counts, strict=True)]


def _handoff(
    config: ServerConfig, experts: ExpertsInRam, c: Qwen3MoeConfig, max_tokens: int, device: torch.device
) -> ExpertHandoff:
    deferred = config.max_deferred_experts_per_token
    if deferred > c.top_k:
        raise ConfigError(f"--max-deferred-experts-per-token: {deferred}, but a token has {c.top_k} experts")
    return ExpertHandoff(
        experts.stream,
        experts.layers,
        step_sizes(max_tokens)[-1],
        c.hidden_size,
        c.top_k,
        device,
        max_deferred=deferred,
        timeout_s=HANG_SECONDS,
    )


def _expert_stream(experts: ExpertsInRam, placement: Placement, device: torch.device) -> ExpertStream | None:
    """None, with the reason in the log, where the experts in RAM cannot be streamed."""
    if placement.stream_bytes == 0:
        return None
    if experts.stream.nodes > 1:
        _cannot_stream(placement, "they lie on several memory nodes", "say --numa-nodes 1")
        return None
    try:
        return ExpertStream(experts.layers, device)
    except RuntimeError as error:
        with suppress(RuntimeError):  # CUDA reports the error once more, with the next launch
            torch.zeros(1, device=device)
        _cannot_stream(placement, f"their memory cannot be pinned ({error})", "free some RAM")
        return None


def _cannot_stream(placement: Placement, obstacle: str, remedy: str) -> None:
    """Says so in the log. Raises ConfigError where a rule asks for it."""
    if placement.streaming_rule is not None:
        raise ConfigError(
            f"--placement-rules: {placement.streaming_rule} cannot be: experts are not streamed to the GPU, as "
            f"{obstacle}; leave `prefill` out, or {remedy}"
        )
    log.warning("experts are not streamed to the GPU, prompts are read on the CPU: %s", obstacle)


def allocate(model: Qwen3MoeConfig, num_slots: int, num_layers: int, device: torch.device) -> list[KvLayer]:
    """Zeros: what was there before, a NaN say, would come back through masked keys."""
    shape = (num_slots, model.num_kv_heads, model.head_dim)
    return [
        KvLayer(*(torch.zeros(shape, dtype=torch.float16, device=device) for _ in "kv"))
        for _ in range(num_layers)
    ]


def _check_lanes(gguf: ModelSource, c: Qwen3MoeConfig) -> None:
    for name, size in (("embedding_length", c.hidden_size), ("expert_feed_forward_length", c.expert_ff)):
        if size % LANES:
            raise ConfigError(f"{gguf.path}: {name} is {size}; the GPU engine needs a multiple of {LANES}")


def _empty_cache(device: torch.device) -> None:
    """What unpacking left behind goes back to the device, whose free memory is then asked for."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(placement: Placement, device: torch.device, in_ram: InRam | None) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    if in_ram is None:
        return f"{device.type} ({name})"
    layers = len(placement.layers)
    here = f"{placement.num_gpu_experts} of {placement.num_experts * layers} experts"
    if placement.layers_in_ram:
        here = f"the last {len(placement.gpu_layers)} of {layers} layers and {here}"
    elif placement.begins_in_ram:
        here = f"all but the embedding and {here}"
    stream = in_ram.stream
    return f"{device.type} ({name} with {here}, the others in RAM: {stream.isa}, {stream.threads} threads)"
