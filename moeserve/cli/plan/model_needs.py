"""The memory that one of several models needs with full pools, and the pool sizes that keep it within that memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from moeserve.cli.plan.fit import Fit, fit_model
from moeserve.cli.plan.several_gpus import plan_group
from moeserve.cli.plan.tower import CUDA_LIBRARIES_BYTES
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.models.facts import facts_of
from moeserve.models.gpu_features import gpu_shape
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.processes.resident_memory import LIBRARIES_BYTES, SERVER_BYTES, VOCABULARY_BYTES
from moeserve.worker.loading.device import parse_gpus

# The share of the models' memory for one model's KV pool and recurrent states if no option sets it. It leaves room for
# other loaded models.
POOL_SHARE: Final = 1 / 8
ALIKE_SHARE: Final = 0.9  # a GPU with at least this share of the first GPU's memory may take its place
ANY_RAM: Final = 1 << 60  # bytes; so large that nothing is refused because of it


def needs_of(config: ServerConfig, ram: int, gpus: Sequence[int]) -> dict[str, Any]:
    """Returns what a model needs: bytes of RAM (beside `resident_memory.COMMON_BYTES`) and of each of its GPUs when all
    pools are full, the GPUs from which these may be chosen, the bytes of its weights, and the options that keep the
    server within this memory. `ram`: bytes that all models may take together; `gpus`: bytes of each GPU. Raises
    UserError for a model that cannot be served in that memory."""
    if config.worker is not None:
        return _remote_needs(config)
    count, choices = (0, []) if config.device == "cpu" or not gpus else gpu_choices(config.gpus, gpus)
    if count > 1:
        return _divided_needs(config, ram, min(gpus[number] for number in choices), choices)
    gpu_there = min(gpus[number] for number in choices) if count else None
    ram += LIBRARIES_BYTES  # a single model's plan contains them
    fitted = alone = fit_model(config, gpu_there, ANY_RAM)
    overrides: dict[str, Any] = {}
    if config.max_total_tokens is None and alone.memory.ram_start <= ram:
        # Half of what is free beside the weights becomes the KV pool (kv/capacity.py).
        room = min(ram, alone.memory.ram_start + int(2 * POOL_SHARE * (ram - LIBRARIES_BYTES)))
        fitted = fit_model(config, gpu_there, room)
        overrides = _pinned(config, fitted)
        fitted = fit_model(dataclasses.replace(config, **overrides), gpu_there, ram)
    memory = fitted.memory
    # If the weights alone do not fit, the error is about them, not about a pool.
    needed = memory.ram_full if memory.ram_start <= ram else memory.ram_start
    return {
        "ram": needed - LIBRARIES_BYTES,
        "gpus": [] if gpu_there is None else [memory.gpu],
        "gpu_choices": choices,
        "weights": memory.ram_weights + memory.gpu_weights,
        "max_model_len": memory.max_model_len,
        "overrides": overrides,
        "facts": _facts(fitted.source),
    }


def gpu_choices(text: str, gpus: Sequence[int]) -> tuple[int, list[int]]:
    """Returns how many GPUs --gpus asks for, and the numbers of the GPUs that may be used: the named ones, else all
    that are about as large as the first. Raises ConfigError if there are too few."""
    numbers = parse_gpus(text)
    if max(numbers) >= len(gpus):
        raise ConfigError(
            f"--gpus {text}: this machine has {len(gpus)} GPUs, numbered from 0; choose among them"
        )
    if "," in text:
        return len(numbers), numbers
    alike = [number for number, size in enumerate(gpus) if size >= ALIKE_SHARE * gpus[0]]
    return len(numbers), alike if len(alike) >= len(numbers) else list(range(len(gpus)))


def _divided_needs(config: ServerConfig, ram: int, gpu: int, choices: list[int]) -> dict[str, Any]:
    """Returns the needs of a model that several GPUs divide. It takes all memory of each GPU, or its budget, because
    its KV pool takes the rest. `gpu`: bytes of the smallest GPU."""
    count = len(parse_gpus(config.gpus))
    source = open_metadata(Path(config.model))
    model = gpu_shape(read_checked_shape(source), config.max_model_len)
    plans = plan_group(config, source, model, gpu, ram, count)
    in_ram = sum(plan.placement.cpu_weight_bytes for plan in plans)
    each = (
        gpu if config.gpu_memory_budget is None else int(config.gpu_memory_budget * GIB) + CUDA_CONTEXT_BYTES
    )
    processes = SERVER_BYTES + VOCABULARY_BYTES * model.vocab_size + count * CUDA_LIBRARIES_BYTES
    tokens = min(plan.kv_tokens for plan in plans)
    return {
        "ram": processes + in_ram,
        "gpus": [min(each, gpu)] * count,
        "gpu_choices": choices,
        "weights": in_ram + sum(plan.placement.gpu_weight_bytes for plan in plans),
        "max_model_len": min(config.max_model_len or model.context_length, tokens),
        "overrides": {},
        "facts": _facts(source),
    }


def _remote_needs(config: ServerConfig) -> dict[str, Any]:
    """Returns the needs of a model whose worker is on another machine: only its other processes run here."""
    source = open_metadata(Path(config.model))
    model = read_checked_shape(source)
    return {
        "ram": SERVER_BYTES + VOCABULARY_BYTES * model.vocab_size,
        "gpus": [],
        "gpu_choices": [],
        "weights": 0,
        "max_model_len": config.max_model_len or model.context_length,
        "overrides": {},
        "facts": _facts(source),
    }


def _facts(source: ModelSource) -> dict[str, str]:
    facts = facts_of(source)
    return {"architecture": facts.architecture, "size": facts.size, "quantization": facts.quantization}


def _pinned(config: ServerConfig, fit: Fit) -> dict[str, Any]:
    """Returns options that fix the sizes of the pools, which the server would otherwise choose from all free memory."""
    pinned: dict[str, Any] = {"max_total_tokens": fit.memory.kv_tokens}
    state_bytes = fit.sizes.state_bytes()
    if state_bytes and config.state_snapshot_budget is None:
        snapshots = fit.memory.ram_states + fit.memory.gpu_states - config.max_num_seqs * state_bytes
        pinned["state_snapshot_budget"] = max(0, snapshots) / GIB
    if fit.memory.ram_tier and config.kv_ram is None:
        pinned["kv_ram"] = fit.memory.ram_tier / GIB
    return pinned
