"""A follower of several ranks under Triton's interpreter:
`python -m tests.kernels.group.follower [sums-within-norms]`."""

from __future__ import annotations

import sys

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: it sets up the interpreter)
from moeserve.worker.engines.gpu.steps import step_path
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.loading.group.follower import main
from tests.kernels.group.shared_sums import connect

LEAST_ROWS = 2  # of a part of a step, so that small ones have parts

if __name__ == "__main__":
    step_path.LEAST_PART_ROWS = LEAST_ROWS
    if "sums-within-norms" in sys.argv[1:]:
        RankGroup.connect = connect  # type: ignore[method-assign]
    sys.exit(main())
