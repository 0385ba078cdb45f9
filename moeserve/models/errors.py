"""The error raised when a model's files cannot be opened or read, in any format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from moeserve.errors import UserError

MAX_PROBLEM_CHARS = 1500  # some 80 supported model types take 1,000
MAX_NAME_CHARS = 120  # longest quoted name or word from a file
GGUF_REMEDY: Final = (
    "convert the model again with a current llama.cpp, or choose another GGUF file of it or a newer moeserve"
)
_LONG_NAME = re.compile(
    rf"""'[^']{{{MAX_NAME_CHARS},}}'|"[^"]{{{MAX_NAME_CHARS},}}"|\S{{{MAX_NAME_CHARS + 1},}}"""
)


class ModelError(UserError, ValueError):
    """The files cannot be served. Names the file, the key or tensor, the cause and the remedy.

    The text is shown to users: quotations from the file are shortened, and contain no terminal control characters.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {_quotable(problem)}")
        self.path = path


class SettingError(ModelError):
    """A setting or tensor that this version cannot serve: unknown, contradictory, missing or of the wrong kind. Ends
    with the remedy, which depends on the file's format."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, f"{problem}; {remedy_of(path)}")


def remedy_of(path: Path) -> str:
    """Returns what to do about a file or folder whose contents cannot be served. A file that is none of a folder's is
    a GGUF, whatever its name: Ollama's have no suffix."""
    if path.suffix not in (".json", ".safetensors") and not path.is_dir():
        return GGUF_REMEDY
    return (
        "download it again if it is not as published, else choose a GGUF file or another checkpoint of the model, or "
        "a newer moeserve"
    )


def replaced_error(path: Path) -> ModelError:
    """Returns the error for a file that is not the one, or not the version of it, that was mapped."""
    return ModelError(path, "was replaced or changed since it was loaded; restart the server")


def _quotable(text: str) -> str:
    """Returns text without control characters, shortened in the middle if too long (the end has the remedy). Names
    inside are shortened likewise, so that a hostile one cannot hide the rest."""
    text = _LONG_NAME.sub(lambda name: f"{name[0][: MAX_NAME_CHARS - 20]}...{name[0][-20:]}", text)
    if len(text) > MAX_PROBLEM_CHARS:
        half = MAX_PROBLEM_CHARS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
