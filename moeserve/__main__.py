"""`python -m moeserve`, and what the `moeserve` command and launch.py run."""

from __future__ import annotations

import sys

from moeserve.processes.imports_without_gc import imports_without_gc


def run() -> int:
    """The exit code; 130 where Ctrl-C ended a command that does not mind it, or came while it was being loaded."""
    try:
        with imports_without_gc():
            from moeserve.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
