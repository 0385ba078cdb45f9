"""`python -m moeserve.worker`: the worker process, started by the launcher.

On the CPU it loads the model and then only keeps it: what serves is a fork (`keeper.py`), so that the weights outlive a
crash. On a GPU, whose driver survives no fork, one process does both.
"""

from __future__ import annotations

from typing import Final

from moeserve.deferred_modules import defer, load_named
from moeserve.lasting_imports import lasting_imports
from moeserve.messages.channels import PushChannel
from moeserve.process import Process, line_to_launcher, run_process
from moeserve.worker.progress import LoadingBar

# How torch computes shapes on its device "meta": long to import, and nothing that the CPU engine needs.
TORCH_META: Final = "torch._meta_registrations"


def main(process: Process, *, outlives_routers: bool = False) -> None:
    """outlives_routers: none of them may end it."""
    # Here, not above: torch takes seconds to import, and a machine on which it or our extension cannot be
    # loaded gets told so through the launcher.
    defer(TORCH_META)
    with lasting_imports():
        from moeserve.worker import keeper
        from moeserve.worker.cpu_loading import load_cpu_model, try_cpu_model
        from moeserve.worker.device import choose_device
        from moeserve.worker.loading import load_runner
        from moeserve.worker.runner import Runner
        from moeserve.worker.service import serve

    def serve_with(runner: Runner) -> None:
        serve(
            runner,
            process.paths.worker,
            on_listening=lambda: process.ready(engine=runner.ready()),
            on_router_lost=runner.router_lost,
            outlives_routers=outlives_routers,
        )

    bar = LoadingBar(
        PushChannel(process.context, process.paths.http), may_draw=process.config.log_format == "text"
    )
    line = line_to_launcher()
    try:
        if line is None or choose_device(process.config.device) != "cpu":
            load_named(TORCH_META)
            line, runner = None, load_runner(process.config, bar)
        else:
            model = load_cpu_model(process.config, bar)
    finally:
        bar.close()
    if line is None:
        serve_with(runner)
    else:
        keeper.keep(process, line, lambda is_first: serve_with(try_cpu_model(model, is_first=is_first)))


if __name__ == "__main__":
    run_process("worker", main)
