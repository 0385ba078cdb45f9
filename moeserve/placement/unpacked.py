"""Chooses the layers whose experts a GPU holds a second time, unpacked to 16-bit floats (--unpacked-experts)."""

from __future__ import annotations

from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.models.step_buffers import UNPACKED_EXPERTS_ROWS
from moeserve.placement.placement import Placement
from moeserve.placement.sizes import ModelSizes


def given_gib(config: ServerConfig) -> float:
    """Returns the number that --unpacked-experts was given, in GiB; 0 for "auto"."""
    return 0.0 if config.unpacked_experts == "auto" else config.unpacked_experts


def check_unpacked(config: ServerConfig, step_tokens: int) -> None:
    """Raises ConfigError if a number of GiB is to hold unpacked experts, but no step of up to `step_tokens` tokens uses
    them."""
    if given_gib(config) and step_tokens <= UNPACKED_EXPERTS_ROWS:
        raise ConfigError(
            f"--unpacked-experts: only steps of more than {UNPACKED_EXPERTS_ROWS} tokens use "
            f"them, and --max-num-batched-tokens is "
            f"{step_tokens}; leave it out, or choose a larger --max-num-batched-tokens"
        )


def with_unpacked(placement: Placement, sizes: ModelSizes, budget: int | None) -> Placement:
    """Returns `placement` with the layers whose experts are also kept unpacked: the first ones that fit into `budget`
    bytes, among the layers with all experts on the GPU and all of them quantised. budget: None: no layer. Raises
    ConfigError if there is no such layer, or the budget is too small for one."""
    if budget is None:
        return placement
    candidates = _candidates(placement, sizes)
    if not candidates:
        raise ConfigError(
            "--unpacked-experts: no layer has all its experts, quantised, on the GPU; leave it out, or choose a "
            "smaller number"
        )
    fitting, taken = _fitting(candidates, budget)
    if not fitting:
        least = min(nbytes for _, nbytes in candidates)
        raise ConfigError(
            f"--unpacked-experts {budget / GIB:.2f}: the experts of one layer take {least / GIB:.2f} GiB as 16-bit "
            "floats; leave it out, or choose a larger number"
        )
    return replace(placement, unpacked_layers=fitting, unpacked_bytes=taken)


def layers_beside_kv(
    placement: Placement, sizes: ModelSizes, left: int, kept_kv: int, most_kv: int
) -> tuple[tuple[int, ...], int]:
    """Returns the layers whose experts are kept unpacked with --unpacked-experts auto, and their bytes. left: bytes for
    KV and these. They take what KV cannot use (beyond `most_kv` bytes), or up to half of `left`, as long as `kept_kv`
    bytes remain for KV. No layer, if any expert is in RAM: the memory serves KV and those experts better."""
    if any(layer.num_cpu_experts for layer in placement.layers):
        return (), 0
    return _fitting(_candidates(placement, sizes), max(left - most_kv, min(left // 2, left - kept_kv)))


def _candidates(placement: Placement, sizes: ModelSizes) -> list[tuple[int, int]]:
    """Returns the layers whose experts can be kept unpacked, with their bytes."""
    return [
        (index, size.unpacked)
        for index, (layer, size) in enumerate(zip(placement.layers, sizes.layers, strict=True))
        if size.unpacked and layer.dense == "cuda" and not layer.num_cpu_experts
    ]


def _fitting(candidates: list[tuple[int, int]], budget: int) -> tuple[tuple[int, ...], int]:
    """Returns the first layers that fit into `budget` bytes, and their bytes."""
    fitting, taken = [], 0
    for index, nbytes in candidates:
        if taken + nbytes <= budget:
            fitting.append(index)
            taken += nbytes
    return tuple(fitting), taken
