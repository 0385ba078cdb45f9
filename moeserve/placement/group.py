"""Placement on one of several GPUs: its share of the model, all of it in its memory."""

from __future__ import annotations

from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.interface import ModelShape
from moeserve.placement.options import placement_options, with_state_slots
from moeserve.placement.place import Gpu, place
from moeserve.placement.placement import Placement
from moeserve.placement.sizes import ModelSizes
from moeserve.units import GIB


def place_share(config: ServerConfig, sizes: ModelSizes, shape: ModelShape, gpu: Gpu) -> Placement:
    """sizes: of the share. Raises ConfigError where it does not fit: experts in RAM are for one GPU alone."""
    given = replace(placement_options(config, shape), counts=None)  # a share's experts are chosen already
    options = with_state_slots(given, config, sizes, gpu)
    placement = place(sizes, options, gpu)
    if placement.begins_in_ram or placement.shares_layers:
        budget = gpu.free_bytes if options.gpu_memory_budget is None else options.gpu_memory_budget
        raise ConfigError(
            f"--gpus: this GPU's share of the model does not fit in {budget / GIB:.2f} GiB, and with several GPUs no "
            "part of it may be in RAM; use more GPUs, or one with experts in RAM"
        )
    return placement
