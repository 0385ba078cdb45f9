"""A follower of several ranks under Triton's interpreter: `python -m tests.kernels.follower`."""

from __future__ import annotations

import sys

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: it sets up the interpreter)
from moeserve.worker.group.follower import main

if __name__ == "__main__":
    sys.exit(main())
