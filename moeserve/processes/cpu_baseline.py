"""Checks that the CPU has the instructions that the libraries use everywhere, before one of them is loaded: else the
process would end with SIGILL, and no message."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

# What compilers make of x86-64-v2, for which NumPy's wheels are compiled, by Linux's names of the flags. Our own
# kernels ask for what they use.
_BASELINE: Final = ("popcnt", "ssse3", "sse4_1", "sse4_2")
_LOOKED_AT: Final = 16 << 10  # bytes; the first core's part is shorter


def missing_instructions(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> list[str]:
    """Returns the instruction sets that this CPU lacks, by their names in `cpuinfo`; none if it does not say, or is no
    x86-64. machine: `platform.machine()` by default."""
    if (machine or platform.machine()) != "x86_64":
        return []
    try:
        with cpuinfo.open("rb") as opened:
            text = opened.read(_LOOKED_AT).decode(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return [one for one in _BASELINE if one not in value.split()]
    return []
