"""The one error that opening or reading a model's files raises, whatever their format."""

from __future__ import annotations

from pathlib import Path

from moeserve.errors import UserError


class ModelError(UserError, ValueError):
    """Files that cannot be served: names the file, the key or tensor, the cause and the remedy.

    The text is meant for the user as it stands.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
