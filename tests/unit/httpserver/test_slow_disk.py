"""/health says that steps wait for a disk, and stops saying so when they no longer do."""

from __future__ import annotations

import pytest

from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.messages.expert_disk import REPORT_S, ExpertDiskCounts
from tests.support.servers.engine_messages import ready_message


def test_health_tells_of_a_slow_disk_while_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("moeserve.httpserver.generation.engine.slow_disk.time.monotonic", lambda: now[0])
    state = EngineState(text_ready=True, ready=ready_message(8).ready)
    totals = ExpertDiskCounts()
    notes = []
    for waited_s in (0.1, 0.9, 0.4, 0.6):  # of each second
        for _ in range(int(REPORT_S)):
            now[0] += 1.0
            waited = 1000 * waited_s
            step = ExpertDiskCounts(hits=3, misses=1, bytes=1 << 28, waited_ms=waited, busy_ms=1000.0)
            totals = totals.plus(step)
            state.slow_disk.told(totals)
        health = state.health()
        assert health["status"] == "ok"  # it serves: a gateway must not take it away
        notes.append(health.get("note"))
    assert (notes[0], notes[2]) == (None, None)
    assert notes[1] == (
        "steps waited for experts from disk for 54 of the last 60 s: it reads 0.25 GiB/s, and 75% of the experts were "
        "in RAM; raise --expert-ram, or use a faster disk"
    )
    assert notes[3] is not None
    assert "for 36 of the last 60 s" in notes[3]
    state.draining = True
    assert "note" not in state.health()
