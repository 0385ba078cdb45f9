"""Writes the configuration for the child processes."""

from __future__ import annotations

import dataclasses
import os

import msgspec

from moeserve.config import ServerConfig, to_json_dict
from moeserve.messages.steps import WorkerReady
from moeserve.processes.runtime_paths import RuntimePaths


def write_config(config: ServerConfig, paths: RuntimePaths) -> None:
    """Writes the configuration file atomically and with mode 0600 from the start, as it may contain the API key."""
    unnamed = paths.config_file.with_suffix(".new")
    descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(to_json_dict(config)))
    unnamed.rename(paths.config_file)


def pinned(config: ServerConfig, engine: WorkerReady) -> ServerConfig:
    """Returns the configuration for restarted workers, with the sizes that the first worker chose by the machine's
    free memory, so that they choose the same. Only the first worker makes a debug dump and records a routing trace."""
    return dataclasses.replace(
        config,
        max_total_tokens=engine.num_kv_slots,
        max_model_len=engine.max_model_len,
        kv_window_ratio=config.kv_window_ratio if engine.num_window_slots else 0.0,
        debug_dump=None,
        debug_dump_steps=None,
        record_routing_trace=None,
        record_routing_tokens=None,
    )
