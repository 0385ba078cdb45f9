"""From a configuration to what executes plans: threads, weights, KV pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import Engine
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.model import Qwen3Moe
from moeserve.models.qwen3moe.weights import WeightLoader
from moeserve.models.source import ModelSource, open_dummy_model, open_model
from moeserve.placement import ModelSizes, place
from moeserve.placement.options import wishes_of
from moeserve.placement.step_tokens import step_tokens
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints import Constraints
from moeserve.worker.cpu_stream import check_ram, open_stream
from moeserve.worker.device import choose_device
from moeserve.worker.kv_pool import SHARE_OF_FREE_MEMORY, KvRoom, allocate, plan_capacity
from moeserve.worker.memory import available_bytes
from moeserve.worker.ready import ready_message
from moeserve.worker.runner import Runner
from moeserve.worker.self_test import check_logits
from moeserve.worker.step_dump import open_dump

if TYPE_CHECKING:
    from moeserve.worker.gpu_runner import GpuRunner

# The sampler's instruction set for each --isa. It needs no VNNI, so by itself it may choose another than the engine.
SAMPLER_ISA = {"auto": None, "plain": "plain", "avx2": "avx2", "avx512_vnni": "avx512"}


Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


def load_runner(config: ServerConfig, on_progress: Progress) -> Runner | GpuRunner:
    """Loads the model of `config.model` on the device that `config.device` chooses, and allocates everything a step
    needs.

    Raises ModelError for a bad file, ConfigError where the memory does not suffice, the CPU lacks `config.isa`, or
    there is no such device. The model has been tried then (`self_test.py`).
    """
    runner = _load_on_device(config, on_progress)
    check_logits(runner, Path(config.model))
    return runner


def _load_on_device(config: ServerConfig, on_progress: Progress) -> Runner | GpuRunner:
    if choose_device(config.device) == "cpu":
        return load_cpu_runner(config, on_progress)
    _set_up_torch()
    from moeserve.worker.gpu_loading import load_gpu_runner  # a machine without a GPU may lack Triton

    return load_gpu_runner(config, open_weights(config), on_progress, torch.device("cuda", 0))


def open_weights(config: ServerConfig) -> ModelSource:
    """The model, or one of its shapes with random weights. Raises ModelError."""
    path = Path(config.model)
    return open_dummy_model(path) if config.load_format == "dummy" else open_model(path)


def _set_up_torch() -> None:
    torch.set_num_threads(1)  # the pool computes; torch only moves a few rows
    torch.set_grad_enabled(False)


def load_cpu_runner(config: ServerConfig, on_progress: Progress) -> Runner:
    """On the CPU."""
    _refuse_gpu_flags(config)
    _set_up_torch()
    stream = open_stream(config)
    gguf = open_weights(config)
    # Its helper thread builds the vocabulary while this one loads the weights.
    constraints = Constraints(config.max_num_seqs, lambda: Engine(TextTokenizer.from_gguf(gguf)))
    model_config = Qwen3MoeConfig.from_gguf(gguf)
    model_config.check_tensors(gguf)
    tokens = step_tokens(config.max_num_batched_tokens, model_config, gpu_bytes=None)
    most_rows = max(tokens, config.max_num_seqs)
    dump = open_dump(config, model_config, most_rows)
    place(ModelSizes.of(gguf.tensors, model_config), wishes_of(config, model_config), gpu=None)
    in_place = config.weight_layout == "file"
    if in_place and not gguf.is_mapped:
        raise ConfigError(
            "--weight-layout file needs a GGUF file and its own weights; leave it out, or say panels"
        )
    if not in_place:
        check_ram(gguf.file_bytes, remedy="or read it from disk with --weight-layout file")
    weights = WeightLoader(stream, gguf, model_config, on_progress, in_place).load()
    room = KvRoom("memory", available_bytes(), model_config.num_layers, SHARE_OF_FREE_MEMORY)
    capacity = plan_capacity(config, model_config, [room])
    model = Qwen3Moe(
        model_config,
        weights,
        stream,
        allocate(model_config, capacity.num_slots, model_config.num_layers),
        max_tokens=most_rows,
        max_model_len=capacity.max_model_len,
    )
    ready = ready_message(config, model_config, capacity, weights.bytes, _device(stream), tokens)
    return Runner(stream, model, ready, constraints, SAMPLER_ISA[config.isa], dump)


def _refuse_gpu_flags(config: ServerConfig) -> None:
    """Raises ConfigError for those that would be ignored here and are not about what lies where: `place` refuses the
    others."""
    if config.max_deferred_experts_per_token:
        flag = "--max-deferred-experts-per-token"
    elif config.gpu_prefill_token_threshold is not None:
        flag = "--gpu-prefill-token-threshold"
    else:
        return
    raise ConfigError(f"{flag}: has no effect on the CPU engine; leave it out, or choose a GPU")


def _device(stream: CpuStream) -> str:
    nodes = f" on {stream.nodes} memory nodes" if stream.nodes > 1 else ""
    return f"cpu ({stream.isa}, {stream.threads} threads{nodes})"
