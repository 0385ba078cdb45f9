"""Splits the generations of one HTTP request into few messages to the router, each bounded in size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moeserve.messages.schema import GenerateRequest

MAX_BATCH_BYTES: Final = 32 << 20  # the most bytes of tokens in a message, unless one request has more


def batches_of(requests: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    """Returns the requests of each message. All requests have the same grammar, if any."""
    batches: list[list[GenerateRequest]] = []
    room = 0
    for request in requests:
        size = len(request.token_ids) + (0 if request.resumed is None else len(request.resumed.token_ids))
        if size > room:
            batches.append([])
            room = MAX_BATCH_BYTES
        batches[-1].append(request)
        room -= size
    return batches
