"""`python -m moeserve.httpserver`, started by the launcher."""

from __future__ import annotations

import os

from moeserve.processes.imports_without_gc import imports_without_gc

with imports_without_gc():
    import uvloop

    from moeserve.config import FRONT_SECRET_ENV
    from moeserve.httpserver.app import APIS
    from moeserve.httpserver.batches import front_lines
    from moeserve.httpserver.server import serve
    from moeserve.processes.lifecycle import Process, run_process


def main(process: Process) -> None:
    apis = (*APIS, front_lines.API) if FRONT_SECRET_ENV in os.environ else APIS
    uvloop.run(serve(process, apis))


if __name__ == "__main__":
    run_process("httpserver", main)
