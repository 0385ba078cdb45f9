"""What one of several models needs: its memory with full pools, and the sizes of pools that keep it within that."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from moeserve.cli.plan.fit import Fit, fit_model
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.models.facts import facts_of
from moeserve.processes.resident_memory import LIBRARIES_BYTES

# The part of the models' memory that one model's KV pool and recurrent states get, where no option says it: loaded
# models then leave room for each other.
POOL_SHARE: Final = 1 / 8
ANY_RAM: Final = 1 << 60  # bytes; so much that nothing is refused for it


def needs_of(config: ServerConfig, ram: int, gpu: int) -> dict[str, Any]:
    """Returns the model's bytes of RAM (beside `resident_memory.COMMON_BYTES`) and of the GPU when all pools are full,
    the bytes of its weights, and the options that keep the server within them. `ram`: bytes that all models may take
    together. Raises UserError for a model that cannot be served in so much."""
    ram += LIBRARIES_BYTES  # part of a single model's plan
    gpu_there = gpu if gpu and config.device != "cpu" else None
    fitted = alone = fit_model(config, gpu_there, ANY_RAM)
    overrides: dict[str, Any] = {}
    if config.max_total_tokens is None and alone.memory.ram_start <= ram:
        # Half of what is free beside the weights becomes the KV pool (kv/capacity.py).
        room = min(ram, alone.memory.ram_start + int(2 * POOL_SHARE * (ram - LIBRARIES_BYTES)))
        fitted = fit_model(config, gpu_there, room)
        overrides = _pinned(config, fitted)
        fitted = fit_model(dataclasses.replace(config, **overrides), gpu_there, ram)
    facts, memory = facts_of(fitted.source), fitted.memory
    # Where the weights alone are too much, so much is said, and not what any pool would add.
    needed = memory.ram_full if memory.ram_start <= ram else memory.ram_start
    return {
        "ram": needed - LIBRARIES_BYTES,
        "gpu": memory.gpu if gpu_there is not None else 0,
        "weights": memory.ram_weights + memory.gpu_weights,
        "max_model_len": memory.max_model_len,
        "overrides": overrides,
        "facts": {
            "architecture": facts.architecture,
            "size": facts.size,
            "quantization": facts.quantization,
        },
    }


def _pinned(config: ServerConfig, fit: Fit) -> dict[str, Any]:
    """The sizes of the pools, which the server would choose by all the memory that is free."""
    pinned: dict[str, Any] = {"max_total_tokens": fit.memory.kv_tokens}
    state_bytes = fit.sizes.state_bytes()
    if state_bytes and config.state_snapshot_budget is None:
        snapshots = fit.memory.ram_states + fit.memory.gpu_states - config.max_num_seqs * state_bytes
        pinned["state_snapshot_budget"] = max(0, snapshots) / GIB
    if fit.memory.ram_tier and config.kv_ram is None:
        pinned["kv_ram"] = fit.memory.ram_tier / GIB
    return pinned
