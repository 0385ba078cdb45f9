"""The file format of benchmark figures, which `python -m benchmarks.compare` compares.

One JSON object:

    {"format": "moeserve-benchmark", "version": 1,
     "benchmark": "bench engine",                    the program
     "machine": {"cpu": "...", "cores": 2, "memory_gib": 7.8, "gpu": null},
     "commit": "5b9a7b2...", "date": "2026-11-22T10:50:00Z",
     "settings": {"model": "...", "threads": "2"},   everything else that the figures depend on
     "figures": [{"name": "decode, 1 stream", "value": 412.3, "unit": "tok/s", "higher_is_better": true}]}

`commit` is null if moeserve does not run from a git checkout, and ends in "-dirty" if files differ from the commit. A
figure's name is unique in a file, and has the same meaning in every file of one benchmark.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

import moeserve
from moeserve.errors import UserError

FORMAT: Final = "moeserve-benchmark"
VERSION: Final = 1
_REPOSITORY = Path(moeserve.__file__).resolve().parents[1]


class ResultsError(UserError):
    """A file is not a benchmark's result file."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure."""

    name: str
    value: float
    unit: str
    higher_is_better: bool


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cpu: str
    cores: int  # cores that the process may use
    memory_gib: float
    gpu: str | None


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    benchmark: str
    machine: Machine
    commit: str | None
    date: str  # UTC, ISO 8601
    settings: dict[str, str]
    figures: list[Measured]


def results_of(
    benchmark: str, settings: Mapping[str, object], figures: Sequence[Measured], gpu: str | None = None
) -> Results:
    """Returns the results of a run that ends now on this machine. gpu: the GPU's name, if one was used."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    shown = {name: str(value) for name, value in settings.items()}
    return Results(FORMAT, VERSION, benchmark, _machine(gpu), _commit(), now, shown, list(figures))


def write_results(path: Path, results: Results) -> None:
    """Writes the results as indented JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def read_results(path: Path) -> Results:
    """Reads a result file. Raises ResultsError with the file's name and the fault."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: {error}") from error
    if (results.format, results.version) != (FORMAT, VERSION):
        raise ResultsError(
            f"{path}: is {results.format} {results.version}, not {FORMAT} {VERSION}; measure again "
            "with this version"
        )
    names = [figure.name for figure in results.figures]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ResultsError(f"{path}: more than one figure is called {min(twice)!r}")
    for figure in results.figures:
        if not math.isfinite(figure.value) or figure.value <= 0:
            raise ResultsError(
                f"{path}: {figure.name!r} is {figure.value:g}; a ratio needs a figure above 0: measure "
                "it again"
            )
    return results


def _machine(gpu: str | None) -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(_cpu_name(), len(os.sched_getaffinity(0)), round(memory / (1 << 30), 1), gpu)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=_REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
