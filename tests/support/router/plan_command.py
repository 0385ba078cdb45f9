"""`moeserve plan` in this process, with given rates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.cli.main import main
from moeserve.cli.plan.rates import CpuRates

RATES = CpuRates(read=50e9, dense_ops=1e12, expert_ops=1e12, op_s=1e-6, step_s=1e-4, row_s=1e-5)


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def fails(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *flags])
    assert caught.value.code == 2
    return capsys.readouterr().err
