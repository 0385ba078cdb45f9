"""The number of tokens that --kv-ram and --kv-disk would hold, and the time of a long prompt: loaded from them, and
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

READ_BYTES_PER_S = 1e9  # from disk, unless the user states a rate; NVMe disks read faster
LONG_PROMPT = 32_768  # tokens, or a request's maximum if that is less


@dataclass(frozen=True, slots=True)
class TierForecast:
    num_bytes: int
    tokens: int  # tokens that it holds, without states
    state_bytes: int  # bytes beside each prompt's KV, for models with recurrent state
    tokens_per_s: float  # tokens read per second, without states
    prompt: int  # tokens of the long prompt
    load_s: float
    compute_s: float


def disk_tier_bytes(config: ServerConfig, placement: Placement) -> int:
    """Returns the bytes of the disk tier; 0 without --kv-disk. Raises ConfigError as the server does, for --kv-ram
    too."""
    for flag, is_wanted in (("--kv-ram", bool(config.kv_ram)), ("--kv-disk", config.kv_disk is not None)):
        if is_wanted and config.prefix_cache == "off":
            raise ConfigError(
                f"{flag}: is a part of the prefix cache, which --prefix-cache off switches off; leave "
                "one of them out"
            )
    if config.kv_disk is not None and placement.uses_gpu and placement.layers_in_ram:
        raise ConfigError(
            "--kv-disk: there is no disk tier if the CPU computes the first layers; leave it out"
        )
    if config.kv_disk is None:
        if config.kv_disk_gib is not None:
            raise ConfigError(
                "--kv-disk-gib: has no effect without --kv-disk; add --kv-disk, or leave --kv-disk-gib out"
            )
        return 0
    return int((DEFAULT_GIB if config.kv_disk_gib is None else config.kv_disk_gib) * GIB)


def forecast_tiers(
    tiers: dict[Tier, tuple[int, float]],
    sizes: ModelSizes,
    prefill: Callable[[int], float],
    max_model_len: int,
) -> dict[Tier, TierForecast]:
    """Returns the forecast of each tier. tiers: the bytes of each, and the bytes per second that can be read from it;
    tiers of 0 bytes are left out. prefill: returns the tokens per second of a prompt of a given length."""
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
