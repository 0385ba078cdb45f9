"""Runs commands whose standard output may be a closed pipe (`| head`) or a file on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

PIPE_CLOSED: Final = 141  # exit code that a shell reports for a program that SIGPIPE ended
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def with_output(run: Callable[[list[str]], int], arguments: Sequence[str]) -> int:
    """Runs a command. Returns its exit code, PIPE_CLOSED if nothing reads its output, 1 if there is no room for it."""
    try:
        try:
            return run(list(arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _discard_output()
        print(f"moeserve: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Discards the rest of the output. Otherwise Python would report an error when it flushes the stream at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
