"""Notes the rows of a worker's steps without drafts."""

from __future__ import annotations

import pytest

from moeserve.worker.engines.engine import TokenMasks
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s


def noted_without_drafts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were sampled in each step without drafts, as where there are none."""
    rows, sample = [], runner.engine.sample

    def noted(slots: Int32s, masks: TokenMasks | None) -> None:
        rows.append(len(slots))
        sample(slots, masks)

    monkeypatch.setattr(runner.engine, "sample", noted)
    return rows
