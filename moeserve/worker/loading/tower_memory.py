"""Lets the vision tower take its part of the GPU's memory before the worker plans the rest."""

from __future__ import annotations

import time
from typing import Final

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.placement.tower_room import budget_beside_tower
from moeserve.processes.runtime_paths import RuntimePaths

DEADLINE_S: Final = 600.0  # the launcher ends a server whose visual server has failed
POLL_S: Final = 0.02


def beside_tower(config: ServerConfig, paths: RuntimePaths) -> ServerConfig:
    """Waits until the visual server, if there is one that may use this GPU, has its memory. Returns the configuration
    with the rest of --gpu-memory-budget. Raises ConfigError if the budget is too small, or the visual server does not
    start."""
    if config.mmproj is None or config.mmproj_device == "cpu":
        return config
    deadline = time.monotonic() + DEADLINE_S
    while not paths.tower_memory.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--mmproj: the vision tower was not loaded within {DEADLINE_S:g} s; try --mmproj-device cpu"
            )
        time.sleep(POLL_S)
    return budget_beside_tower(config, int(paths.tower_memory.read_text()))
