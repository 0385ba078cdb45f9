"""Writes a chat to the terminal: answers, and between them notes, reasoning and a temporary status line."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import Final, TextIO

from moeserve.cli.run.terminal_text import safe_line, safe_text

_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_ERASE_LINE: Final = "\r\x1b[K"
STATUS_EVERY_S: Final = 0.2


class Screen:
    """Writes what the model says to `answers` and all else to `notes`, which are the same stream in a chat. Only a
    terminal gets a status line, and colours if NO_COLOR is empty and TERM is not "dumb". All texts are made safe for a
    terminal here, except those given to `answer` and `reasoning`, which the caller has filtered already. Raises
    BrokenPipeError if `answers` is closed."""

    def __init__(self, answers: TextIO, notes: TextIO, environment: Mapping[str, str]) -> None:
        self._answers: Final = answers
        self._notes: Final = notes
        is_terminal = notes.isatty() and environment.get("TERM") != "dumb"
        self._has_status: Final = is_terminal
        self._has_colours: Final = is_terminal and not environment.get("NO_COLOR")
        # For answers: with a single question they go to another stream than notes.
        self.has_styles: Final = (
            answers.isatty() and environment.get("TERM") != "dumb" and not environment.get("NO_COLOR")
        )
        self._shows_status = False
        self._status_at = 0.0

    def columns(self) -> int:
        return shutil.get_terminal_size().columns

    def answer(self, text: str) -> None:
        """Writes a piece of the answer. text: filtered already."""
        if not text:
            return
        self.clear_status()
        self._answers.write(text)
        self._answers.flush()

    def reasoning(self, text: str) -> None:
        """Writes a dimmed piece of reasoning. text: filtered already. Each piece ends its own colour, so that the
        terminal does not stay dim however the program ends."""
        self._write(self._dimmed(text))

    def note(self, text: str) -> None:
        """Writes a line from the program itself."""
        self._write(f"{safe_text(text)}\n")

    def heading(self, text: str) -> None:
        """Writes a dimmed line from the program itself."""
        self._write(f"{self._dimmed(safe_line(text))}\n")

    def status(self, text: str, *, now: bool = False) -> None:
        """Replaces the status line by this one, at most once in STATUS_EVERY_S unless `now`."""
        at = time.monotonic()
        if self._has_status and (now or at - self._status_at >= STATUS_EVERY_S):
            self._status_at = at
            self._shows_status = True
            self._notes.write(_ERASE_LINE + self._dimmed(safe_line(text)))
            self._notes.flush()

    def clear_status(self) -> None:
        if self._shows_status:
            self._shows_status = False
            self._notes.write(_ERASE_LINE)
            self._notes.flush()

    def _write(self, text: str) -> None:
        self.clear_status()
        self._notes.write(text)
        self._notes.flush()

    def _dimmed(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._has_colours and text else text
