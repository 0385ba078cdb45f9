"""`python -P -m moeserve.processes.begin MODULE`: the entry point of every process that the launcher starts.

A process's imports run before it can report to the launcher, and may fail: a library is missing or broken, or a file
on PYTHONPATH shadows a library. In that case the last line on stderr names the error and the module, and the exit
code tells the launcher that such a line exists. -P keeps modules in the working directory from being imported.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import Final

EXIT_NOT_IMPORTED: Final = 4


def main() -> None:
    module = sys.argv[1]
    del sys.argv[1]
    try:
        # calls `run_process`, which does not return
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException as error:  # noqa: BLE001  a module may raise anything, SystemExit too
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        name = module.rpartition(".")[2]
        cause = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        print(f"{name} could not be imported: {cause}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_IMPORTED)


if __name__ == "__main__":
    main()
