"""Token ids that a client names."""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.httpserver.transport.errors import invalid


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises ApiError 400 for an id beyond the vocabulary."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise invalid(param, f"token ids must be in the range 0 to {vocab_size - 1}, got {highest}")
