"""`python -P -m moeserve.processes.begin MODULE`: how the launcher starts a process of the server.

What such a process imports before it has a line to the launcher may fail: a library is missing or broken, or a file on
PYTHONPATH has a library's name. Then its last line says what and where, and its exit code says that there is one.
-P: a file in the current directory does not stand in for a module.
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
        runpy.run_module(module, run_name="__main__", alter_sys=True)  # `run_process`, which does not return
    except BaseException as error:  # noqa: BLE001  a module may raise anything, SystemExit too
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        name = module.rpartition(".")[2]
        cause = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        print(f"{name} could not be imported: {cause}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_IMPORTED)


if __name__ == "__main__":
    main()
