"""Why a request is refused: the closed list behind `moeserve:request_refusals_total`."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """The client's message and status say more; this is for counting."""

    INVALID = (
        "invalid"  # a field, a value, the JSON, a grammar or a template that cannot be read or does not fit
    )
    UNSUPPORTED = (
        "unsupported"  # a field, a tool or an encoding that other servers know and this one does not
    )
    TOO_LONG = "too_long"  # prompt and answer do not fit the context, or beams the KV pool
    TOO_LARGE = "too_large"  # the body or the head in bytes
    NOT_FOUND = "not_found"  # a path, a model, an adapter or a stored response
    AUTH = "auth"  # no API key, or a wrong one
    FORBIDDEN = "forbidden"  # a foreign page, an unknown host, or what this server does not allow
    QUEUE_FULL = "queue_full"
    QUOTA = "quota"  # of this API key: its share of the queue, of open requests or of bodies
    MEMORY = "memory"  # bodies or grammars take all that there is for them
    CONNECTIONS = (
        "connections"  # of all clients or of one address: the connection is closed, mostly without an answer
    )
    LOADING = "loading"
    UNAVAILABLE = "unavailable"  # the engine restarts, hangs or takes nothing
    SHUTTING_DOWN = "shutting_down"
    TIMEOUT = "timeout"  # the request's body or the request itself took too long
