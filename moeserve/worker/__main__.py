"""`python -m moeserve.worker`: the worker process, started by the launcher.

The process keeps data that is slow to load, so that a crash does not repeat the loading, and forks the process that
serves (`keeper.py`). On the CPU it keeps the model. On a GPU, whose driver does not survive a fork, it keeps the
imported modules and the vocabulary (`inherited.py`), and each fork loads the model. With several GPUs, or without a
launcher that asks for forks, a single process does everything.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from moeserve.messages.channels import PushChannel
from moeserve.processes.deferred_modules import defer, load_named
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.imports_without_gc import imports_without_gc
from moeserve.processes.lifecycle import Process, line_to_launcher, load_config, run_process
from moeserve.worker.loading.progress import LoadingBar

if TYPE_CHECKING:
    from moeserve.worker.loading.start import Start
    from moeserve.worker.runner import Runner

log = logging.getLogger(__name__)

# torch's modules for shapes on the device "meta": slow to import, and not needed by the CPU engine.
TORCH_META: Final = "torch._meta_registrations"


def main(process: Process, *, outlives_routers: bool = False) -> None:
    """Runs the worker. outlives_routers: a router's shutdown message does not end it."""
    # Imported late: torch takes seconds to import, and an import error must be reported through the launcher.
    defer(TORCH_META)
    with imports_without_gc():
        from moeserve.worker.loading import keeper
        from moeserve.worker.loading.cpu.load import load_cpu_model, try_cpu_model
        from moeserve.worker.loading.device import choose_in_fork, is_divided
        from moeserve.worker.loading.inherited import Inherited
        from moeserve.worker.loading.start import Start, StartClock, process_began
        from moeserve.worker.loading.tower_memory import beside_tower
        from moeserve.worker.service import serve

    def serve_with(runner: Runner) -> None:
        serve(
            runner,
            process.paths.worker,
            on_listening=lambda: process.ready(engine=runner.ready()),
            on_router_lost=runner.router_lost,
            outlives_routers=outlives_routers,
        )

    line = line_to_launcher()
    if line is None or is_divided(process.config):
        load_named(TORCH_META)
        serve_with(_load(process, Start()))
    elif choose_in_fork(process.config.device) == "cpu":
        bar = _loading_bar(process)
        try:
            model = load_cpu_model(process.config, bar)
        finally:
            bar.close()
        spans = EmbeddingFiles(process.paths.spans)
        keeper.keep(
            process, line, lambda is_first: serve_with(try_cpu_model(model, spans, is_first=is_first))
        )
    else:
        inherited, began = Inherited(), process_began()
        spans = EmbeddingFiles(process.paths.spans)
        with imports_without_gc():
            load_named(TORCH_META)
            _import_for_gpu()

        def live(is_first: bool) -> None:
            if not is_first:
                process.config = load_config(process.paths)  # includes the sizes that the first worker chose
            process.config = beside_tower(process.config, process.paths)
            if is_first:
                serve_with(_load(process, Start(inherited, clock=StartClock(began)), spans))
            else:
                serve_with(_load(process, Start(inherited, is_first=False), spans))

        keeper.keep(process, line, live, "worker start", lambda: inherited.prepare(process.config))


def _load(process: Process, start: Start, spans: EmbeddingFiles | None = None) -> Runner:
    from moeserve.worker.loading.load import load_runner

    start.clock.ended("imports")
    bar = _loading_bar(process)
    try:
        return load_runner(process.config, bar, start=start, spans=spans)
    finally:
        bar.close()


def _import_for_gpu() -> None:
    """Imports the modules that forks need for a GPU. If one is missing, the forks report it, as on a machine without
    a GPU."""
    try:
        import moeserve.worker.loading.gpu.load  # noqa: F401
    except ImportError as error:
        log.debug("%s", error)


def _loading_bar(process: Process) -> LoadingBar:
    to_http = PushChannel(process.context, process.paths.http)
    return LoadingBar(to_http, may_draw=process.config.log_format == "text")


if __name__ == "__main__":
    run_process("worker", main)
