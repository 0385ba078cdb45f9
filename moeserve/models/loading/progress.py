"""The callback by which loading reports its progress."""

from __future__ import annotations

from collections.abc import Callable

# (stage, amount done, total): bytes, or the unit that COUNTED names
OnProgress = Callable[[str, int, int], None]

COMPILING = "compiling kernels"
CAPTURING = "capturing CUDA graphs"
TIMING = "timing steps"
COUNTED = {COMPILING: "kernels", CAPTURING: "graphs", TIMING: "steps"}
