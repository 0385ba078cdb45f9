"""How loading says how far it is."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]  # stage, done, in all: bytes, or what COUNTED names

COMPILING = "compiling kernels"
CAPTURING = "capturing CUDA graphs"
TIMING = "timing steps"
COUNTED = {COMPILING: "kernels", CAPTURING: "graphs", TIMING: "steps"}
