"""Which GPUs a model gets: the GPUs that its --gpus names, else the least used ones.

A model's server sees its own GPUs only (CUDA_VISIBLE_DEVICES), numbered from 0. So it takes no memory of another GPU,
and all that it took is free when its processes have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moeserve.front.memory import Memory

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class GpuUse:
    """Says what another model has of each GPU, and whether it is loaded and busy."""

    need: Memory
    is_loaded: bool  # its server has processes
    is_busy: bool  # requests run on it or wait for it


def choose_gpus(count: int, choices: Sequence[int], others: Sequence[GpuUse]) -> tuple[int, ...]:
    """Returns `count` of the GPU numbers in `choices`, in order.

    GPUs come first that have fewer bytes of busy models, then of loaded ones, then of all models by plan: so a model
    gets a free GPU, else one whose model is idle."""

    def in_use(number: int) -> tuple[int, int, int, int]:
        sizes = [(use, use.need.gpus[number] if number < len(use.need.gpus) else 0) for use in others]
        busy = sum(size for use, size in sizes if use.is_busy and use.is_loaded)
        loaded = sum(size for use, size in sizes if use.is_loaded)
        return busy, loaded, sum(size for _, size in sizes), number

    if count == len(choices):
        return tuple(choices)
    return tuple(sorted(sorted(choices, key=in_use)[:count]))


def on_gpus(ram: int, each: Sequence[int], numbers: Sequence[int]) -> Memory:
    """Returns a model's memory. each: bytes of each of its GPUs, whose numbers are `numbers`."""
    gpus = [0] * (max(numbers, default=-1) + 1)
    for number, size in zip(numbers, each, strict=True):
        gpus[number] = size
    return Memory(ram, tuple(gpus))


def visible_gpus(environment: Mapping[str, str], numbers: Sequence[int]) -> dict[str, str]:
    """Returns the variables with which a process sees these GPUs only. `numbers` count those that this process sees."""
    if not numbers:
        return {}
    here = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return {VISIBLE: ",".join(here[number] if number < len(here) else str(number) for number in numbers)}
