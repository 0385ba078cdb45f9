"""`python -m moeserve.cli.models.model_needs DIRECTORY PLACE RAM GPU`: what one of several models needs, as JSON.

A process of its own, which the front starts: a model's file is a stranger's, and reading it takes a second. RAM is what
all models may take together in bytes; GPU is the GPU memory that they may, or "ask" to have it asked of the driver.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from moeserve.cli.models.need import gpu_bytes
from moeserve.cli.plan.fit import Fit, fit_model
from moeserve.config import LAUNCHER_PID_ENV, ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import UserError
from moeserve.front.config import FrontConfig
from moeserve.models.facts import facts_of
from moeserve.models.open import open_model
from moeserve.processes.lifecycle import die_with

# The part of the models' memory that one model's KV pool and recurrent states get, where no option says it: loaded
# models then leave room for each other.
POOL_SHARE: Final = 1 / 8
ANY_RAM: Final = 1 << 60  # bytes; so much that nothing is refused for it


def main() -> int:
    directory, place, ram, gpu = sys.argv[1:]
    die_with(int(os.environ[LAUNCHER_PID_ENV]))
    served = FrontConfig.read(Path(directory)).models[int(place)]
    try:
        gpu_there = (gpu_bytes() or 0) if gpu == "ask" else int(gpu)
        answer = {"gpu_there": gpu_there, **needs_of(served.config, int(ram), gpu_there)}
    except UserError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def needs_of(config: ServerConfig, ram: int, gpu: int) -> dict[str, Any]:
    """Bytes of RAM and of the GPU when all pools are full, and the options that keep the server within them. Raises
    UserError for a model that cannot be served in so much."""
    if config.load_format == "auto":
        open_model(
            Path(config.model)
        )  # a file that is cut short is found before another model makes room for it
    gpu_there = gpu if gpu and config.device != "cpu" else None
    fitted = alone = fit_model(config, gpu_there, ANY_RAM)
    overrides: dict[str, Any] = {}
    if config.max_total_tokens is None and alone.memory.ram_start <= ram:
        # Half of what is free beside the weights becomes the KV pool (kv/capacity.py).
        room = min(ram, alone.memory.ram_start + int(2 * POOL_SHARE * ram))
        fitted = fit_model(config, gpu_there, room)
        overrides = _pinned(config, fitted)
        fitted = fit_model(dataclasses.replace(config, **overrides), gpu_there, ram)
    facts, memory = facts_of(fitted.source), fitted.memory
    return {
        # Where the weights alone are too much, so much is said, and not what any pool would add.
        "ram": memory.ram_full if memory.ram_start <= ram else memory.ram_start,
        "gpu": memory.gpu if gpu_there is not None else 0,
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


if __name__ == "__main__":
    sys.exit(main())
