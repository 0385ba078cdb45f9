"""`python -m moeserve.httpserver`, started by the launcher."""

from __future__ import annotations

from moeserve.lasting_imports import lasting_imports

with lasting_imports():
    import uvloop

    from moeserve.httpserver.server import serve
    from moeserve.process import Process, run_process


def main(process: Process) -> None:
    uvloop.run(serve(process))


if __name__ == "__main__":
    run_process("httpserver", main)
