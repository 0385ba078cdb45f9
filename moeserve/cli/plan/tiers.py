"""The tokens that --kv-ram and --kv-disk would hold, and the time of a long prompt if it is loaded and if it is
computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.disk.store import DEFAULT_GIB
from moeserve.messages.pages import Tier
from moeserve.placement import ModelSizes, Placement

READ_BYTES_PER_S = 1e9  # from disk, where the user does not say: below what NVMe disks read
LONG_PROMPT = 32_768  # tokens, or what a request may have


@dataclass(frozen=True, slots=True)
class TierForecast:
    num_bytes: int
    tokens: int  # that it holds, without states
    state_bytes: int  # beside the KV of each prompt, of a model with recurrent state
    tokens_per_s: float  # read, without states
    prompt: int  # tokens of a prompt
    load_s: float
    compute_s: float


def disk_tier_bytes(config: ServerConfig, placement: Placement) -> int:
    """0 without --kv-disk. Raises ConfigError as the server does, for --kv-ram too."""
    for flag, is_wanted in (("--kv-ram", bool(config.kv_ram)), ("--kv-disk", config.kv_disk is not None)):
        if is_wanted and config.prefix_cache == "off":
            raise ConfigError(f"{flag}: is a part of the prefix cache, which --prefix-cache off switches off")
    if config.kv_disk is not None and placement.uses_gpu and placement.layers_in_ram:
        raise ConfigError(
            "--kv-disk: there is no disk tier if the CPU computes the first layers; leave it out"
        )
    if config.kv_disk is None:
        if config.kv_disk_gib is not None:
            raise ConfigError("--kv-disk-gib: has no effect without --kv-disk; add it, or leave this out")
        return 0
    return int((DEFAULT_GIB if config.kv_disk_gib is None else config.kv_disk_gib) * GIB)


def forecast_tiers(
    tiers: dict[Tier, tuple[int, float]],
    sizes: ModelSizes,
    prefill: Callable[[int], float],
    max_model_len: int,
) -> dict[Tier, TierForecast]:
    """tiers: of each its bytes, and how many a second are read from it; those of no bytes are none. prefill: tokens a
    second of a prompt of that length."""
    token_bytes, state_bytes = sizes.kv_bytes(), sizes.state_bytes()
    prompt = min(LONG_PROMPT, max_model_len)
    return {
        name: TierForecast(
            num_bytes=num_bytes,
            tokens=num_bytes // token_bytes,
            state_bytes=state_bytes,
            tokens_per_s=rate / token_bytes,
            prompt=prompt,
            load_s=(prompt * token_bytes + state_bytes) / rate,
            compute_s=prompt / prefill(prompt),
        )
        for name, (num_bytes, rate) in tiers.items()
        if num_bytes
    }
