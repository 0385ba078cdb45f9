"""Which moeserve this is, said here alone: pyproject.toml reads it, a test compares CHANGELOG.md with it."""

from __future__ import annotations

VERSION = "0.1.0"


def version() -> str:
    return VERSION
