"""Chooses the layers whose experts a GPU holds a second time, unpacked to 16-bit floats (--unpacked-experts)."""

from __future__ import annotations

from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.models.step_buffers import UNPACKED_EXPERTS_ROWS
from moeserve.placement.placement import Placement
from moeserve.placement.sizes import ModelSizes


def check_unpacked(config: ServerConfig, step_tokens: int) -> None:
    """Raises ConfigError if experts are to be kept unpacked, but no step of up to `step_tokens` tokens uses them."""
    if config.unpacked_experts is not None and step_tokens <= UNPACKED_EXPERTS_ROWS:
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
    fitting, taken = [], 0
    candidates = [
        (index, size.unpacked)
        for index, (layer, size) in enumerate(zip(placement.layers, sizes.layers, strict=True))
        if size.unpacked and layer.dense == "cuda" and not layer.num_cpu_experts
    ]
    if not candidates:
        raise ConfigError(
            "--unpacked-experts: no layer has all its experts, quantised, on the GPU; leave it out, or choose a "
            "smaller number"
        )
    for index, nbytes in candidates:
        if taken + nbytes <= budget:
            fitting.append(index)
            taken += nbytes
    if not fitting:
        least = min(nbytes for _, nbytes in candidates)
        raise ConfigError(
            f"--unpacked-experts {budget / GIB:.2f}: the experts of one layer take {least / GIB:.2f} GiB as 16-bit "
            "floats; leave it out, or choose a larger number"
        )
    return replace(placement, unpacked_layers=tuple(fitting), unpacked_bytes=taken)
