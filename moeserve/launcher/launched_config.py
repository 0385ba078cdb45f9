"""The configuration that the launcher writes for its children."""

from __future__ import annotations

import dataclasses
import os

import msgspec

from moeserve.config import ServerConfig, to_json_dict
from moeserve.messages.steps import WorkerReady
from moeserve.processes.runtime_paths import RuntimePaths


def write_config(config: ServerConfig, paths: RuntimePaths) -> None:
    """Mode 0600 from the first moment, for it may hold the API key; and whole, whoever reads it meanwhile."""
    unnamed = paths.config_file.with_suffix(".new")
    descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(to_json_dict(config)))
    unnamed.rename(paths.config_file)


def pinned(config: ServerConfig, engine: WorkerReady) -> ServerConfig:
    """For the workers after the first: what that one chose by the machine's free memory, the others are told. What is
    recorded of steps is the first one's."""
    return dataclasses.replace(
        config,
        max_total_tokens=engine.num_kv_slots,
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_window_ratio=config.kv_window_ratio if engine.num_window_slots else 0.0,
        debug_dump=None,
        debug_dump_steps=None,
        record_routing_trace=None,
        record_routing_tokens=None,
    )
