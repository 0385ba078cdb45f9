"""The reasons for refusing a request: the labels of `moeserve:request_refusals_total`."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """A reason, for counting; the client's message and status say more."""

    # A field, a value, the JSON, a grammar or a template that cannot be read or does not fit.
    INVALID = "invalid"
    # A field, a tool or an encoding that other servers know and this one does not.
    UNSUPPORTED = "unsupported"
    TOO_LONG = "too_long"  # prompt and answer do not fit the context, or beams the KV pool
    TOO_LARGE = "too_large"  # the body or the head in bytes
    NOT_FOUND = "not_found"  # a path, a model, an adapter or a stored response
    AUTH = "auth"  # no API key, or a wrong one
    FORBIDDEN = "forbidden"  # a foreign page, an unknown host, or what this server does not allow
    QUEUE_FULL = "queue_full"
    QUOTA = "quota"  # of this API key: its share of the queue, of open requests or of bodies
    MEMORY = "memory"  # bodies or grammars take all that there is for them
    # Of all clients or of one address: the connection is closed, mostly without an answer.
    CONNECTIONS = "connections"
    LOADING = "loading"
    UNAVAILABLE = "unavailable"  # the engine restarts, hangs or takes nothing
    SHUTTING_DOWN = "shutting_down"
    TIMEOUT = "timeout"  # the request's body or the request itself took too long
