"""Compiles what the benchmarks will launch, in parallel: every process fills Triton's cache on disk."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from moeserve.kernels import launch

Task = tuple[str, str, tuple[Any, ...]]  # module, function, arguments


def run_task(task: Task, pdl: bool) -> Any:
    """In a process of its own. Gives the result, or the text of the exception."""
    launch.PDL = pdl
    module, function, arguments = task
    try:
        call: Callable[..., Any] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        return call(*arguments)
    except Exception:  # noqa: BLE001  (one kernel's failure is reported, the others go on)
        return traceback.format_exc(limit=-4)


def in_parallel(tasks: Iterable[Task], *, pdl: bool) -> dict[Task, Any]:
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run_task, task, pdl): task for task in tasks}
        return {futures[f]: f.result() for f in as_completed(futures)}


def tasks_for(modes: list[str]) -> list[Task]:
    tasks: list[Task] = []
    for mode in modes:
        if mode in ("kernels", "decode", "prefill"):
            module = importlib.import_module(f"benchmarks.gpu.{mode}")
            tasks += [(mode, "warm_up", case) for case in module.warm_up_cases()]
    return tasks


def report_failures(results: dict[Task, Any]) -> None:
    for task, error in results.items():
        if task[1] == "warm_up" and error is not None:
            print(f"{task}: {error}", flush=True)
