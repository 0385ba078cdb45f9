"""Which moeserve this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """As installed; empty where it runs from its sources."""
    try:
        return importlib.metadata.version("moeserve")
    except importlib.metadata.PackageNotFoundError:
        return ""
