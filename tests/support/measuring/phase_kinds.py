"""What the pool's threads did, phase by phase, added up by kinds of phases: for benchmarks/pool_phases.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve.kernels.phase_times import Times


@dataclass(frozen=True)
class Kind:
    operation: str
    number: int
    units: int  # of all threads; about, where it changes from step to step


@dataclass
class Spent:
    """Ticks, a number for each phase."""

    wall: list[float]
    late: list[float]
    latest: list[float]
    working: list[float]
    longest: list[float]
    ahead: list[float]
    idle: list[float]


def spent_by_kind(threads: list[Times], names: list[str]) -> dict[Kind, Spent]:
    """threads, names: of `phase_times` and `operation_names`."""
    units = np.stack([times["units"] for times in threads]).astype(np.int64)
    entered, begun, over = (
        np.stack([times[name] for times in threads]).astype(np.float64)
        for name in ("entered", "begun", "over")
    )
    ends = over.min(axis=0)
    before = np.concatenate([entered[:, :1].min(axis=0), ends[:-1]])
    worked = units > 0
    work = np.where(worked, begun - entered, np.nan)
    columns = {
        "wall": ends - before,
        "late": np.maximum(entered - before, 0).mean(axis=0),
        "latest": np.maximum(entered - before, 0).max(axis=0),
        "working": np.nanmean(work, axis=0),
        "longest": np.nanmax(work, axis=0),
        "ahead": np.stack([times["ahead"] for times in threads]).max(axis=0).astype(np.float64),
        "idle": np.maximum(ends - begun, 0).mean(axis=0),
    }
    found: dict[Kind, Spent] = {}
    for index, first in enumerate(threads[0]):
        total = int(units[:, index].sum())
        kind = Kind(names[first["operation"]], int(first["number"]), _rounded(total))
        spent = found.setdefault(kind, Spent([], [], [], [], [], [], []))
        for name, values in columns.items():
            getattr(spent, name).append(float(values[index]))
    return found


def _rounded(units: int) -> int:
    """The experts that a step reads change: kinds of two leading bits."""
    low = max(units.bit_length() - 2, 0)
    return units >> low << low
