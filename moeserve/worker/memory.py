"""How much memory is left for the KV pool."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be had without swapping: the machine's, or the container's limit (cgroup v2) if tighter."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
