"""What --kv-disk would hold, and how long a long prompt takes from there beside computing it."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.disk.store import DEFAULT_GIB
from moeserve.placement import ModelSizes
from moeserve.plan.speed import CpuSpeed
from moeserve.units import GIB

READ_BYTES_PER_S = 1e9  # where the user does not say: below what NVMe disks read
LONG_PROMPT = 32_768  # tokens, or what a request may have


@dataclass(frozen=True, slots=True)
class DiskTierForecast:
    num_bytes: int
    tokens: int  # that it holds, without states
    state_bytes: int  # beside the KV of each prompt, of a model with recurrent state
    tokens_per_s: float  # read, without states
    prompt: int  # tokens of a prompt
    load_s: float
    compute_s: float


def forecast_disk_tier(
    config: ServerConfig,
    sizes: ModelSizes,
    speed: CpuSpeed | None,
    step_tokens: int,
    max_model_len: int,
    read_bytes_per_s: float,
) -> DiskTierForecast | None:
    """None without --kv-disk. speed: None with a GPU, which has no such tier. Raises ConfigError as the server does."""
    if config.kv_disk is None:
        if config.kv_disk_gib is not None:
            raise ConfigError("--kv-disk-gib: has no effect without --kv-disk; add it, or leave this out")
        return None
    if speed is None:
        raise ConfigError("--kv-disk is for the CPU engine alone; leave it out, or choose --device cpu")
    num_bytes = int((DEFAULT_GIB if config.kv_disk_gib is None else config.kv_disk_gib) * GIB)
    token_bytes, state_bytes = sizes.kv_bytes(), sizes.state_bytes()
    prompt = min(LONG_PROMPT, max_model_len)
    return DiskTierForecast(
        num_bytes=num_bytes,
        tokens=num_bytes // token_bytes,
        state_bytes=state_bytes,
        tokens_per_s=read_bytes_per_s / token_bytes,
        prompt=prompt,
        load_s=(prompt * token_bytes + state_bytes) / read_bytes_per_s,
        compute_s=prompt / speed.prefill(prompt, step_tokens),
    )
