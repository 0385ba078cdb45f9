"""Mamba-2's layers in checkpoints: sizes, names, and the tensors that a GGUF has in another form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .remade import Remade, convolution, decay_rate

# GGUF's key -> names in config.json.
MAMBA2_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "ssm.state_size": ("ssm_state_size", "mamba_d_state"),
    "ssm.group_count": ("n_groups", "mamba_n_groups"),
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv"),
}


def mamba2_sizes(
    path: Path, config: Mapping[str, Any], heads: str, head_dim: str
) -> dict[str, MetadataValue]:
    """Returns the number of heads and their total width. heads, head_dim: config.json's names. Raises ModelError for a
    missing or unsupported setting."""
    count, width = config.get(heads), config.get(head_dim)
    if not isinstance(count, int) or not isinstance(width, int):
        raise SettingError(path, f"{heads!r} is {count!r} and {head_dim!r} {width!r}; numbers are expected")
    return {"ssm.time_step_rank": count, "ssm.inner_size": count * width}


def check_mamba2(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for limited time steps, which no published model has."""
    limits = config.get("time_step_limit")
    if not isinstance(limits, list):
        return
    low, high = (
        each.get("__float__") if isinstance(each, dict) else each for each in (limits + [None] * 2)[:2]
    )
    if low not in (0, 0.0) or high not in (None, "Infinity", math.inf):
        raise SettingError(path, f"'time_step_limit' is {limits!r}; only steps without limits are supported")


def mamba2_names(under: str) -> dict[str, str]:
    """Returns GGUF's names within a layer -> the checkpoint's. under: prefix behind "model.layers.N."."""
    return {
        n.of_part(n.SSM_IN): f"{under}in_proj.weight",
        n.bias_of_part(n.SSM_CONV1D): f"{under}conv1d.bias",
        n.bias_of_part(n.SSM_DT): f"{under}dt_bias",
        n.of_part(n.SSM_NORM): f"{under}norm.weight",
        n.of_part(n.SSM_OUT): f"{under}out_proj.weight",
    }


def mamba2_rules(under: str) -> tuple[Remade, ...]:
    """Returns the rules for the other tensors."""
    return (
        convolution(n.of_part(n.SSM_CONV1D), f"{under}conv1d.weight"),
        decay_rate(n.SSM_A, f"{under}A_log", 1),
        Remade(n.SSM_D, f"{under}D", lambda shape: (*shape, 1)),
    )
