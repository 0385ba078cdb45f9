"""`python -m moeserve.worker`: the worker process, started by the launcher."""

from __future__ import annotations

from moeserve.messages.channels import PushChannel
from moeserve.process import Process, run_process
from moeserve.worker.progress import LoadingBar


def main(process: Process) -> None:
    # Here, not above: torch takes seconds to import, and a machine on which it or our extension cannot be
    # loaded gets told so through the launcher.
    from moeserve.worker.loading import load_runner
    from moeserve.worker.service import serve

    bar = LoadingBar(
        PushChannel(process.context, process.paths.http), may_draw=process.config.log_format == "text"
    )
    try:
        runner = load_runner(process.config, bar)
    finally:
        bar.close()
    serve(runner, process.paths.worker, on_listening=lambda: process.ready(engine=runner.ready()))


if __name__ == "__main__":
    run_process("worker", main)
