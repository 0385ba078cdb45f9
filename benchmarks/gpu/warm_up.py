"""Compiles what the benchmarks will launch, in parallel: every process fills Triton's cache on disk."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from moeserve.kernels import launch

Task = tuple[str, str, tuple[Any, ...]]  # module, function, arguments


def run_task(job: tuple[Task, bool]) -> tuple[Task, Any]:
    """In a process of its own. Gives the result, or the text of the exception."""
    task, launch.PDL = job
    module, function, arguments = task
    try:
        call: Callable[..., Any] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        return task, call(*arguments)
    except Exception:  # noqa: BLE001  (one kernel's failure is reported, the others go on)
        return task, traceback.format_exc(limit=-4)


def in_parallel(tasks: list[Task], *, pdl: bool, patience: float = 100.0) -> dict[Task, Any]:
    """What is not there after `patience` seconds (a kernel that hangs, a process that died) is reported as missing."""
    results: dict[Task, Any] = dict.fromkeys(tasks, "no result in time")
    deadline = time.monotonic() + patience
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        finished = pool.imap_unordered(run_task, [(task, pdl) for task in tasks])
        for _ in tasks:
            try:
                task, result = finished.next(max(0.1, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            results[task] = result
    return results


def tasks_for(modes: list[str]) -> list[Task]:
    tasks: list[Task] = []
    for mode in modes:
        if mode in ("kernels", "decode", "prefill", "tune"):
            module = importlib.import_module(f"benchmarks.gpu.{mode}")
            tasks += [(mode, "warm_up", case) for case in module.warm_up_cases()]
    return tasks


def report_failures(results: dict[Task, Any]) -> None:
    for task, error in results.items():
        if task[1] == "warm_up" and error is not None:
            print(f"{task}: {error}", flush=True)
