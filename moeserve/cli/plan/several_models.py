"""`moeserve plan A B C`: which models fit beside each other, and what loading each one reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from moeserve.cli.plan.model_needs import needs_of
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.processes.resident_memory import COMMON_BYTES
from moeserve.worker.loading.device import parse_gpus

MOST_IN_SETS: Final = 12  # models; more have too many subsets


@dataclass(frozen=True)
class ModelPlan:
    name: str
    ram: int  # bytes, with full pools
    gpu: int  # bytes on each of its GPUs
    max_model_len: int  # tokens of a request
    weight_bytes: int  # read when the model is loaded


@dataclass(frozen=True)
class SeveralModelsPlan:
    models: Sequence[ModelPlan]
    ram: int  # bytes that the server may take, including COMMON_BYTES
    gpu: int
    disk: float  # bytes/s

    @property
    def too_large(self) -> list[ModelPlan]:
        return [model for model in self.models if not self._fits([model])]

    @property
    def largest_sets(self) -> list[tuple[str, ...]]:
        """Returns the sets of models that fit together and to which no other model can be added."""
        fitting = [model for model in self.models if self._fits([model])][:MOST_IN_SETS]
        found: list[set[str]] = []
        for count in range(len(fitting), 0, -1):
            for chosen in itertools.combinations(fitting, count):
                names = {model.name for model in chosen}
                if self._fits(chosen) and not any(names <= larger for larger in found):
                    found.append(names)
        order = [model.name for model in self.models]
        return [tuple(sorted(names, key=order.index)) for names in found]

    def _fits(self, models: Sequence[ModelPlan]) -> bool:
        ram, gpu = sum(model.ram for model in models), sum(model.gpu for model in models)
        return ram + COMMON_BYTES <= self.ram and (gpu <= self.gpu or gpu == 0)


def plan_several(configs: Sequence[ServerConfig], ram: int, gpu: int, disk: float) -> SeveralModelsPlan:
    """Returns the memory that each of several models needs, and a plan of which fit together. configs: resolved. ram:
    bytes that the whole server may take; gpu: bytes of each GPU, 0 without. disk: bytes per second. Raises UserError if
    a model cannot be read or placed."""
    models = []
    for config in configs:
        gpus = [gpu] * (max(parse_gpus(config.gpus)) + 1) if gpu else []
        needs = needs_of(config, max(0, ram - COMMON_BYTES), gpus)
        name = (config.served_model_name or "").split(",")[0]
        models.append(
            ModelPlan(
                name, needs["ram"], max(needs["gpus"], default=0), needs["max_model_len"], needs["weights"]
            )
        )
    return SeveralModelsPlan(models, ram, gpu, disk)


def as_json(plan: SeveralModelsPlan) -> dict[str, Any]:
    return {
        "ram_bytes": plan.ram,
        "common_ram_bytes": COMMON_BYTES,
        "gpu_bytes": plan.gpu,
        "models": [
            {
                "name": model.name,
                "ram_bytes": model.ram,
                "gpu_bytes": model.gpu,
                "max_model_len": model.max_model_len,
                "weight_bytes": model.weight_bytes,
                "read_seconds": model.weight_bytes / plan.disk,
            }
            for model in plan.models
        ],
        "together": [list(names) for names in plan.largest_sets],
        "too_large": [model.name for model in plan.too_large],
    }


def as_text(plan: SeveralModelsPlan) -> str:
    head = ("MODEL", "RAM", *(("GPU",) if plan.gpu else ()), "TOKENS A REQUEST", "READ FROM DISK")
    rows = [head, *(_row(model, plan) for model in plan.models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    where = f"{plan.ram / GIB:.2f} GiB of RAM" + (f" and {plan.gpu / GIB:.2f} of the GPU" if plan.gpu else "")
    sets = [", ".join(names) for names in plan.largest_sets]
    return "\n".join(
        [
            *(line.rstrip() for line in lines),
            "",
            f"All of them share {COMMON_BYTES / GIB:.2f} GiB of RAM: the front and the libraries.",
            f"Fit together in {where}: {'; or '.join(sets) if sets else 'none'}",
            *(f"Does not fit alone: {model.name}" for model in plan.too_large),
            f"Disk: {plan.disk / 1e9:g} GB/s (--disk-bandwidth); a model whose file is in the page cache is not read.",
        ]
    )


def _row(model: ModelPlan, plan: SeveralModelsPlan) -> tuple[str, ...]:
    return (
        model.name,
        f"{model.ram / GIB:.2f} GiB",
        *((f"{model.gpu / GIB:.2f} GiB",) if plan.gpu else ()),
        f"{model.max_model_len:,}",
        f"{model.weight_bytes / plan.disk:.1f} s",
    )
