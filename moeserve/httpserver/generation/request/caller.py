"""Caller: the sender of one HTTP request, and the objects that record the request's results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from moeserve.httpserver.observability.request_record import RequestRecord, record_of
from moeserve.httpserver.transport.request_state import state_of


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, passed from the route to the engine. Through `record`, `notes` and `admit` the
    engine reaches the log line, the answer's headers and the connection."""

    arrival: float  # time.monotonic()
    request_id: str = ""
    tenant: str = ""
    key_owner: str = ""
    record: RequestRecord = field(default_factory=lambda: RequestRecord(time.monotonic()))
    notes: dict[str, str] = field(default_factory=dict)
    admit: Callable[[], None] = lambda: None
    # A line of an offline batch: other requests come first, and --request-timeout does not bound it.
    is_background: bool = False


def caller_of(request: Request) -> Caller:
    """Returns the request's caller. Call it when a route begins: it takes the current time as the arrival."""
    state = state_of(request.scope)
    return Caller(
        time.monotonic(),
        state.request_id,
        state.tenant,
        state.key_owner,
        record_of(request.scope),
        state.notes,
        state.admit,
        state.is_background,
    )
