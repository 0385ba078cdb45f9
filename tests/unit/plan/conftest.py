"""Rates for `moeserve plan` that are not measured."""

from __future__ import annotations

import pytest

from moeserve.cli.plan import command
from tests.support.router.plan_command import RATES


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_cpu", lambda *_: RATES)
