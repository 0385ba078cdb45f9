"""Durations of steps in milliseconds by their rows, for routers in computed time."""

from __future__ import annotations


def waits_for_weights(rows: int) -> float:
    return 50.0 + 0.1 * rows


def computes(rows: int) -> float:
    return 0.5 + 5.0 * rows


def both(rows: int) -> float:
    """As weights that are read for a few rows, and products that take longer for many."""
    return max(40.0, 4.0 * rows)
