"""From a configuration to a GpuRunner: memory planned, weights, KV pool, recorded decode steps."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import Engine
from moeserve.kernels.cpu_stream import KvLayer
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.cpu_experts import ExpertsInRam, load_cpu_experts
from moeserve.models.qwen3moe.expert_stream import ExpertStream
from moeserve.models.qwen3moe.gpu_model import GpuQwen3Moe
from moeserve.models.qwen3moe.gpu_room import step_sizes
from moeserve.models.qwen3moe.gpu_weights import GpuLoader
from moeserve.models.qwen3moe.weights import Progress
from moeserve.models.source import ModelSource
from moeserve.placement import Placement
from moeserve.placement.heat import read_heat
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.calibration import Streaming
from moeserve.worker.constraints import Constraints
from moeserve.worker.cpu_stream import check_ram, open_stream
from moeserve.worker.gpu_memory import plan_placement, step_tokens_on
from moeserve.worker.gpu_runner import GpuRunner
from moeserve.worker.kv_pool import bytes_per_token, plan_capacity
from moeserve.worker.ready import ready_message

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
    placement = plan_placement(config, model_config, gguf, max_tokens, device)
    weights = GpuLoader(gguf, model_config, device, on_progress).load(
        [layer.gpu_experts for layer in placement.layers]
    )
    in_ram = _experts_in_ram(config, gguf, placement, device, on_progress)
    _empty_cache(device)
    assert placement.kv_tokens is not None
    left = placement.kv_tokens * bytes_per_token(model_config)
    capacity = plan_capacity(config, model_config, left, device="GPU")
    slot_table = torch.zeros(
        config.max_num_seqs + 1, capacity.max_model_len, dtype=torch.int32, device=device
    )
    model = GpuQwen3Moe(
        model_config,
        weights,
        allocate(model_config, capacity.num_slots, device),
        slot_table,
        max_tokens=max_tokens,
        max_model_len=capacity.max_model_len,
        handoff=None if in_ram is None else _handoff(config, in_ram, model_config, max_tokens, device),
        expert_stream=None if in_ram is None else _expert_stream(in_ram, placement, device),
        prefill=[layer.prefill for layer in placement.layers],
    )
    weight_bytes = placement.gpu_weight_bytes + placement.cpu_weight_bytes
    name = _device(placement, device, in_ram)
    ready = ready_message(config, model_config, capacity, weight_bytes, name, in_a_step)
    runner = GpuRunner(model, slot_table, ready, constraints, in_ram)
    runner.record()
    if model.can_stream:
        _choose_streaming(runner, config.gpu_prefill_token_threshold)
    return runner


def _choose_streaming(runner: GpuRunner, threshold: int | None) -> None:
    if threshold is None:
        runner.calibrate()
    else:
        runner.stream_by(Streaming.from_tokens(threshold), f"streamed to steps of {threshold} tokens on")


def _experts_in_ram(
    config: ServerConfig,
    gguf: ModelSource,
    placement: Placement,
    device: torch.device,
    on_progress: Progress,
) -> ExpertsInRam | None:
    if not placement.has_cpu_experts:
        return None
    check_ram(placement.cpu_weight_bytes)
    ids = in_ram_order(config, placement)
    return load_cpu_experts(open_stream(config), gguf, ids, device, on_progress)


def in_ram_order(config: ServerConfig, placement: Placement) -> list[list[int]]:
    """Each layer's experts in RAM, the hottest first where that is known: a step that streams some of them takes the
    first, which costs the same whatever their rows, and the CPU's time grows with the rows."""
    ids = [placement.cpu_experts(index) for index in range(len(placement.layers))]
    if config.expert_heat is None:
        return [list(own) for own in ids]
    counts = read_heat(Path(config.expert_heat), len(ids), placement.num_experts).counts
    return [sorted(own, key=of.__getitem__, reverse=True) for own, of in zip(ids, counts, strict=True)]


def _handoff(
    config: ServerConfig, in_ram: ExpertsInRam, c: Qwen3MoeConfig, max_tokens: int, device: torch.device
) -> ExpertHandoff:
    deferred = config.max_deferred_experts_per_token
    if deferred > c.top_k:
        raise ConfigError(f"--max-deferred-experts-per-token: {deferred}, but a token has {c.top_k} experts")
    return ExpertHandoff(
        in_ram.stream,
        in_ram.layers,
        step_sizes(max_tokens)[-1],
        c.hidden_size,
        c.top_k,
        device,
        max_deferred=deferred,
        timeout_s=HANG_SECONDS,
    )


def _expert_stream(in_ram: ExpertsInRam, placement: Placement, device: torch.device) -> ExpertStream | None:
    """None, with the reason in the log, where the experts in RAM cannot be streamed."""
    if placement.stream_bytes == 0:
        return None
    if in_ram.stream.nodes > 1:
        _cannot_stream(placement, "they lie on several memory nodes", "say --numa-nodes 1")
        return None
    try:
        return ExpertStream(in_ram.layers, device)
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


def allocate(model: Qwen3MoeConfig, num_slots: int, device: torch.device) -> list[KvLayer]:
    """Zeros: what was there before, a NaN say, would come back through masked keys."""
    shape = (num_slots, model.num_kv_heads, model.head_dim)
    return [
        KvLayer(*(torch.zeros(shape, dtype=torch.float16, device=device) for _ in "kv"))
        for _ in range(model.num_layers)
    ]


def _check_lanes(gguf: ModelSource, c: Qwen3MoeConfig) -> None:
    for name, size in (("embedding_length", c.hidden_size), ("expert_feed_forward_length", c.expert_ff)):
        if size % LANES:
            raise ConfigError(f"{gguf.path}: {name} is {size}; the GPU engine needs a multiple of {LANES}")


def _empty_cache(device: torch.device) -> None:
    """What unpacking left behind goes back to the device, whose free memory is then asked for."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(placement: Placement, device: torch.device, in_ram: ExpertsInRam | None) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    if in_ram is None:
        return f"{device.type} ({name})"
    total = placement.num_experts * len(placement.layers)
    return (
        f"{device.type} ({name} with {placement.num_gpu_experts} of {total} experts, the others in RAM: "
        f"{in_ram.stream.isa}, {in_ram.stream.threads} threads)"
    )
