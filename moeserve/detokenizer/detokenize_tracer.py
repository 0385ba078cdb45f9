"""Log lines and spans about requests in this process: lines at debug level, and a span where traces are exported."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moeserve.messages.sampling import RequestContext
from moeserve.messages.schema import DetokenizeStart, StopHit, TextItem
from moeserve.processes.tracing import Tracer

log = logging.getLogger(__name__)


class DetokenizeTracer:
    """Observes the messages that `serve` receives and sends; `Detokenizer` does not depend on it."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._open: dict[int, RequestContext] = {}
        self._began: dict[int, float] = {}  # seconds; when the first tokens of each arrived

    @classmethod
    def wanted(cls, tracer: Tracer | None) -> DetokenizeTracer | None:
        """Returns a tracer; None if neither debug lines nor traces are wanted."""
        return cls(tracer) if tracer is not None or log.isEnabledFor(logging.DEBUG) else None

    def opened(self, message: DetokenizeStart) -> None:
        """Called when a request's text begins."""
        self._open[message.id] = message.context

    def tokens(self, items: Sequence[TextItem], hits: Sequence[StopHit], since: float, done: float) -> None:
        """Called when the tokens of a message that arrived at `since` (seconds) have become `items` and `hits`, at
        `done`."""
        for hit in hits:
            self._began.setdefault(hit.id, since)
            self._say(hit.id, "stop string found after %d tokens", hit.num_tokens)
        for item in items:
            began = self._began.setdefault(item.id, since)
            if item.finish_reason is not None:
                self._ended(item, began, done)

    def closed(self, request_id: int, why: str) -> None:
        """Called when a request ends without a final item. A refused request was never open, and is ignored."""
        if request_id in self._open:
            self._say(request_id, "text closed: %s", why)
            self._forget(request_id)

    def _ended(self, item: TextItem, began: float, done: float) -> None:
        tokens = 0 if item.usage is None else item.usage.completion_tokens
        self._say(item.id, "text ended (%s): %d tokens", item.finish_reason, tokens)
        trace = self._open[item.id].trace
        if self._tracer is not None and trace:
            attributes = {"gen_ai.usage.output_tokens": tokens}
            self._tracer.span("detokenize", trace, began, done, attributes)
        self._forget(item.id)

    def _forget(self, request_id: int) -> None:
        del self._open[request_id]
        self._began.pop(request_id, None)

    def _say(self, request_id: int, text: str, *args: object) -> None:
        log.debug(text, *args, extra={"request_id": self._open[request_id].request_id})
