"""`python -m moeserve`, and what the `moeserve` command and launch.py run."""

from __future__ import annotations

import sys

from moeserve.processes.imports_without_gc import imports_without_gc
from moeserve.processes.standard_streams import open_closed_streams

OLDEST = (3, 11)  # pyproject.toml's requires-python


def run() -> int:
    """Returns the exit code; 130 if Ctrl-C ended a command that does not handle it, or came while the command was being
    loaded."""
    open_closed_streams()
    if sys.version_info < OLDEST:
        return _wrong_python("is too old: 3.11 is needed at least")
    try:
        try:
            with imports_without_gc():
                from moeserve.cli.main import main
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "moeserve":
                raise
            return _wrong_python(f"does not have {missing}, which moeserve needs")
        return main()
    except KeyboardInterrupt:
        return 130


def _wrong_python(why: str) -> int:
    """Tells someone who ran a checkout with another Python than that of its environment."""
    print(
        f"moeserve: {sys.executable} (Python {sys.version.split()[0]}) {why}; run it with the environment that "
        "moeserve is installed in, as .venv/bin/python; in a checkout `make serve` makes that",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(run())
