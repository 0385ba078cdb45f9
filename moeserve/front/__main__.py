"""`python -m moeserve.front`, started by the launcher (`launch.py`)."""

from __future__ import annotations

from moeserve.processes.imports_without_gc import imports_without_gc

with imports_without_gc():
    import uvloop

    from moeserve.front.server import serve
    from moeserve.processes.lifecycle import Process, run_process


def main(process: Process) -> None:
    uvloop.run(serve(process))


if __name__ == "__main__":
    run_process("front", main)
