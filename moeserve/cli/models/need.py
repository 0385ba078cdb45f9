"""Writes what a model would need on this machine in one line: `moeserve plan` without measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from moeserve.cli.command_line import resolve
from moeserve.cli.plan.fit import Fit, fit_model
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import UserError
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.processes.gpu_driver import driver_version

MAX_GPUS: Final = 64
_UNITS: Final = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size_text(num_bytes: int) -> str:
    """Returns the size in decimal units, as the Hub shows sizes."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def gpu_bytes() -> int | None:
    """Returns how many bytes of the first GPU's memory a server can use; None without a GPU. Imports torch only if a
    GPU driver is installed."""
    return next(iter(gpus_bytes(1)), None)


def gpus_bytes(most: int = MAX_GPUS) -> list[int]:
    """Returns how many bytes of each GPU's memory a server can use, for the first `most` GPUs."""
    if driver_version() is None:
        return []
    from moeserve.worker.loading.device import choose_device

    if choose_device("auto") == "cpu":
        return []
    import torch

    count = min(torch.cuda.device_count(), most)
    return [int(torch.cuda.mem_get_info(number)[0]) + CUDA_CONTEXT_BYTES for number in range(count)]


def need_of(path: Path, gpu: int | None) -> str:
    """Returns the line about the model at `path`, or the reason why this machine cannot serve it. gpu: the result of
    `gpu_bytes`."""
    try:
        return need_text(fit_here(path, gpu))
    except UserError as error:
        return f"not here: {first_line(str(error))}"


def fit_here(path: Path, gpu: int | None) -> Fit:
    """Returns how much of the model fits on this machine. Raises UserError if the model cannot be read."""
    config = resolve(ServerConfig(model=str(path), device="cpu" if gpu is None else "cuda"))
    return fit_model(config, gpu, available_bytes(), limit_note())


def need_text(fit: Fit) -> str:
    m = fit.memory
    where = f"{m.ram_start / GIB:.1f} GiB RAM at first, {m.ram_full / GIB:.1f} when full"
    if m.gpu:
        where = f"{m.gpu / GIB:.1f} GiB of the GPU, {where}"
    return f"{where}; {m.max_model_len:,} tokens a request"


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows as lines with aligned columns; the last column is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
