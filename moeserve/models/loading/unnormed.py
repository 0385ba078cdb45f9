"""What a block has in the place of a norm before it, if it reads the residual as it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unnormed:
    """No norm: the block reads the residual itself."""
