"""Commands whose standard output is a pipe that nothing reads any more (`| head`), or a file on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

PIPE_CLOSED: Final = 141  # as a shell says of a program that SIGPIPE has ended
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
    """Python would complain when it flushes the stream at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
