"""A program at a pseudo-terminal: what a user types, and what the user sees."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final

import psutil

PATIENCE_S: Final = 60.0
CTRL_C: Final = "\x03"
CTRL_D: Final = "\x04"
# Makes the terminal the controlling one, so that Ctrl-C reaches the program, which a shell in the background ignores.
_AT_TERMINAL: Final = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """Runs a program whose standard streams are a terminal of 24 lines and 80 columns. `seen` is all that it wrote."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._fd, terminal = pty.openpty()
        termios.tcsetwinsize(self._fd, (24, 80))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AT_TERMINAL, *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={"TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(terminal)
        self._is_open = True
        self.seen = ""
        self._told = 0  # of `seen`, what a wait has found

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self, typed: str = "") -> None:
        """Types a text, and Ctrl-C once the program waits for more: readline loses one that comes between its prompt
        and its wait, until the next key."""
        if typed:
            self.send(typed)
            self.wait_for(typed)
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, "the program does not wait"
            time.sleep(0.001)
        self.send(CTRL_C)

    def wait_for(self, text: str) -> str:
        """What came since the last wait, up to the text. Raises AssertionError where it does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while (at := self.seen.find(text, self._told)) < 0:
            comes = self._read(deadline - time.monotonic())
            behind = self.seen[self._told :]
            assert time.monotonic() < deadline, f"{text!r} did not come behind {behind!r}"
            assert comes, f"the program has ended without {text!r}: {behind!r}"
        end = at + len(text)
        found, self._told = self.seen[self._told : end], end
        return found

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code."""
        deadline = time.monotonic() + patience_s
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(PATIENCE_S)

    def hang_up(self) -> None:
        """As when the user closes the terminal's window."""
        os.close(self._fd)
        self._is_open = False

    def _read(self, seconds: float) -> bool:
        """False at the end, and if nothing comes in time."""
        if not select.select([self._fd], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # EIO: no process has the terminal open
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(PATIENCE_S)
        if self._is_open:
            os.close(self._fd)
