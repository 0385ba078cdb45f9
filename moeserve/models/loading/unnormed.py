"""Replaces the norm before a block, in models whose blocks read the residual without a norm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unnormed:
    """Stands in for a norm that a block lacks: the block reads the residual itself."""
