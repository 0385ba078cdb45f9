"""Debug log lines and trace spans about the requests of this process."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from moeserve.messages.sampling import RequestContext
from moeserve.messages.schema import (
    DetokenizeEnd,
    DetokenizeStart,
    GenerateRequest,
    RequestError,
    TokensItem,
    TokensOut,
    Usage,
)
from moeserve.processes.tracing import Tracer

log = logging.getLogger(__name__)


class _Open(NamedTuple):
    context: RequestContext
    arrival: float
    received: float


class RequestTracer:
    """Logs and traces each request from the messages that the manager receives and sends; the scheduler does not know
    of it.

    The debug lines of a request take some 15 us of CPU time, its trace spans 0.5 ms.
    """

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._open: dict[int, _Open] = {}

    @classmethod
    def wanted(cls, tracer: Tracer | None) -> RequestTracer | None:
        """Returns None if neither debug lines nor traces are enabled."""
        return cls(tracer) if tracer is not None or log.isEnabledFor(logging.DEBUG) else None

    def received(self, message: GenerateRequest) -> None:
        """Notes an arrived request."""
        self._open[message.id] = _Open(message.context, message.arrival, time.monotonic())
        _say(message.context, "queued: %d prompt tokens", len(message.token_ids) // 4)

    def sent(self, message: DetokenizeStart | DetokenizeEnd | TokensOut | RequestError) -> None:
        match message:
            case TokensOut(items=items):
                for item in items:
                    if item.finish_reason is not None:
                        self._finished(item)
            case RequestError(id=id, message=cause):
                _say(self._open.pop(id).context, "failed: %s", cause)
            case DetokenizeEnd(id=id):
                _say(self._open.pop(id).context, "ended: its client has gone")

    def _finished(self, item: TokensItem) -> None:
        request, usage = self._open.pop(item.id), item.usage
        if usage is None:
            return
        _say(
            request.context,
            "ended (%s): %d tokens; queue %.1f ms, prefill %.1f ms (%d of %d tokens cached), decode %.1f ms",
            *(item.finish_reason, usage.completion_tokens, usage.queue_ms),
            *(usage.prefill_ms, usage.cached_tokens, usage.prompt_tokens, usage.decode_ms),
        )
        if self._tracer is not None and request.context.trace:
            self._trace(self._tracer, request, usage)

    @staticmethod
    def _trace(tracer: Tracer, request: _Open, usage: Usage) -> None:
        planned = request.arrival + usage.queue_ms / 1e3
        first = planned + usage.prefill_ms / 1e3
        last = first + usage.decode_ms / 1e3
        trace = request.context.trace
        tracer.span("queue", trace, request.received, max(planned, request.received), {})
        prefill = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
        tracer.span("prefill", trace, planned, first, prefill)
        tracer.span("decode", trace, first, last, {"gen_ai.usage.output_tokens": usage.completion_tokens})


def _say(context: RequestContext, text: str, *args: object) -> None:
    log.debug(text, *args, extra={"request_id": context.request_id})
