"""Which tests have one more attempt: those marked `waits_for_processes(reason)`, whose result hangs on how soon the
machine lets other processes run. What is computed never has one: a race there must fail at once.

The summary counts and prints what was tried again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

MARK = "waits_for_processes"
# Folders whose tests depend on nothing but what they compute, or on answers that they wait for.
COMPUTED = ("tests/unit/", "tests/httpserver/", "tests/worker/", "tests/kernels/", "tests/gpu/")


def allow_second_attempts(items: Iterable[pytest.Item]) -> None:
    """Raises UsageError for a mark without a reason, or within a folder of COMPUTED."""
    for item in items:
        marker = item.get_closest_marker(MARK)
        if marker is None:
            continue
        if item.nodeid.startswith(COMPUTED):
            raise pytest.UsageError(f"{item.nodeid}: what is computed has no second attempt")
        if not (marker.args and marker.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: {MARK} needs the reason")
        item.user_properties.append((MARK, marker.args[0]))
        item.add_marker(pytest.mark.flaky(reruns=1))


def report_second_attempts(terminal: pytest.TerminalReporter) -> None:
    """A line for each test that was tried again, with its reason and whether it passed then."""
    again = terminal.stats.get("rerun", [])
    if not again:
        return
    passed = {report.nodeid for report in terminal.stats.get("passed", [])}
    terminal.section(f"second attempts: {len(again)}", yellow=True)
    for report in again:
        reason = dict(report.user_properties).get(MARK, "")
        terminal.line(f"{report.nodeid}: {'passed' if report.nodeid in passed else 'failed'} then ({reason})")
