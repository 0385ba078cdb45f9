"""Stopping a process (SIGSTOP) for a test."""

from __future__ import annotations

import time

import psutil


def suspend(process: psutil.Process, patience_s: float = 30.0) -> None:
    """Returns when it stands still, which on a busy machine is a while after the signal: until then it goes on."""
    process.suspend()
    deadline = time.monotonic() + patience_s
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"{process} goes on"
        time.sleep(0.001)
