"""Detects NVIDIA's driver without loading torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_WSL_DEVICE: Final = "dev/dxg"  # the device of Windows' driver in WSL


def driver_version(root: Path = Path("/")) -> str | None:
    """Returns the version of NVIDIA's kernel module; None if no driver is loaded. `root` contains proc and dev."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return "of Windows (WSL)" if (root / _WSL_DEVICE).exists() else None
    words = text.partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "of an unknown version")
