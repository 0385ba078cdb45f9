"""A short soak: faults of clients and processes under load, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.measuring.soak.run import main


@pytest.mark.slow
@pytest.mark.cpu_engine("each answer must be the undisturbed one")
def test_thirty_faults_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the stretch that shows whether memory grows: it takes thousands of requests."""
    log = tmp_path / "faults.jsonl"
    code = main(["--faults", "30", "--requests", "0", "--stop-seconds", "2", "--log", str(log)])
    assert code == 0, capsys.readouterr().out
    assert len([json.loads(line) for line in log.read_text().splitlines()]) >= 30
