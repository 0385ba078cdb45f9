"""The single question of `moeserve run MODEL "question"`, together with piped input."""

from __future__ import annotations

import os
import stat
import sys
from typing import Final, TextIO

from moeserve.cli.run.pictures import Picture, picture_of
from moeserve.errors import UserError

MOST_PIPED_BYTES: Final = 32 << 20


class NoQuestion(UserError):
    """Neither the arguments nor standard input contain a question."""


def read_question(asked: str, stdin: TextIO | None, pictures: list[Picture]) -> str:
    """Returns the piped text followed by `asked`; a piped picture is added to `pictures`. On a terminal, without
    `asked`, prompts for the question and blocks until Ctrl-D. Raises NoQuestion if there is no text, piped or asked,
    and no picture; another UserError if standard input is neither text nor a picture, or has more than 32 MiB."""
    data = b""
    if stdin is not None and _is_piped(stdin):
        data = stdin.buffer.read(MOST_PIPED_BYTES + 1)
    elif stdin is not None and not asked and stdin.isatty():
        print("the question, then Ctrl-D:", file=sys.stderr)
        data = stdin.buffer.read(MOST_PIPED_BYTES + 1)
    if len(data) > MOST_PIPED_BYTES:
        raise UserError(f"standard input has more than {MOST_PIPED_BYTES >> 20} MiB; give a part of it")
    given = ""
    if picture := picture_of(data, "standard input"):
        pictures.append(picture)
    else:
        given = _text(data)
    parts = [part for part in (given.strip("\n"), asked) if part.strip()]
    if not parts and not pictures:
        raise NoQuestion('there is no question; give one as moeserve run MODEL "question", or by a pipe')
    return "\n\n".join(parts)


def text_of_argument(words: str, what: str) -> str:
    """Returns an argument's text. In a locale that is not UTF-8 Python keeps the shell's bytes as surrogates: they are
    decoded as UTF-8. Raises UserError if they are something else."""
    try:
        words.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(words).decode()
        except UnicodeError:
            raise UserError(f"{what} is not UTF-8 text") from None
    return words


def _is_piped(stdin: TextIO) -> bool:
    """True for a pipe, a file or a socket; false for a terminal and for /dev/null."""
    mode = os.fstat(stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(
            "standard input is neither UTF-8 text nor a PNG, JPEG, WebP or GIF picture; convert it to one "
            "of these"
        ) from None
