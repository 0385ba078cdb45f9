"""OpenTelemetry traces, where an OTLP endpoint is configured. Without one, OpenTelemetry is not imported.

    httpserver   POST /v1/chat/completions   the HTTP request, a child of the client's span (`traceparent`)
                   chat <model>              its generations: tokens, parameters, time to first token (gen_ai.*)
    router           queue, prefill, decode  of each generation
    detokenizer      detokenize

The trace context travels between the processes as `messages.sampling.RequestContext.trace`, W3C's traceparent. The
router and the detokenizer create a span when the phase that it describes is over, from times of `time.monotonic()`, so
that a step does no work for it. A thread sends spans in batches. When the collector does not keep up, spans are dropped
and a log line says so; requests never wait.

OpenTelemetry's environment variables apply: OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER,
OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME, OTEL_SDK_DISABLED and so on.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from moeserve import __version__
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
LAST_SPANS_S: Final = 2.0  # at the end of a process, for sending the last spans


def traces_url(flag: str | None, environment: Mapping[str, str]) -> str | None:
    """Returns the URL that spans are sent to, from the flag's base URL or else OpenTelemetry's variables; None if
    tracing is off. Raises ConfigError for a URL or protocol that is not supported, or when OpenTelemetry is not
    installed."""
    base = flag or environment.get(ENDPOINT_VARIABLES[1])
    whole = None if flag else environment.get(ENDPOINT_VARIABLES[0])
    url = whole or (f"{base.rstrip('/')}/v1/traces" if base else None)
    if url is None:
        return None
    source = "--otlp-endpoint" if flag else " or ".join(ENDPOINT_VARIABLES)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{source}: must be a URL that begins with http:// or https://, not {whole or base!r}"
        )
    for variable in _PROTOCOL_VARIABLES:
        if environment.get(variable, _PROTOCOL) != _PROTOCOL:
            raise ConfigError(
                f"{variable}: only {_PROTOCOL} is supported, not {environment[variable]!r}; unset the "
                "variable"
            )
    if not _is_installed():
        raise ConfigError(f"{source}: traces need OpenTelemetry: pip install 'moeserve[otel]'")
    return url


class Span:
    """An open span. Its `traceparent` makes spans of any process its children."""

    def __init__(self, span: OtelSpan, epoch_ns: int) -> None:
        self._span = span
        self._epoch_ns = epoch_ns
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name, value)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, error: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, error))

    def end(self, at: float) -> None:
        """Ends the span at time `at`, in seconds of `time.monotonic()`."""
        self._span.end(self._epoch_ns + int(at * 1e9))


class Tracer:
    """A process's connection to the collector. Times are seconds of `time.monotonic()`."""

    def __init__(self, process: str, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.instance.id": process})
        if str(resource.attributes["service.name"]).startswith(
            "unknown_service"
        ):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({"service.name": "moeserve"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("moeserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def begin(
        self,
        name: str,
        parent: str,
        start: float,
        attributes: Attributes,
        *,
        is_server: bool = False,
        tracestate: str = "",
    ) -> Span:
        """Begins a span. `parent` is a traceparent; an empty or malformed one starts a new trace."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name,
            self._propagator.extract({"traceparent": parent, "tracestate": tracestate}),
            SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            dict(attributes),
            start_time=self._epoch_ns + int(start * 1e9),
        )
        return Span(span, self._epoch_ns)

    def span(self, name: str, parent: str, start: float, end: float, attributes: Attributes) -> None:
        """Records a span that has ended."""
        self.begin(name, parent, start, attributes).end(end)

    def close(self) -> None:
        """Sends the remaining spans, for at most LAST_SPANS_S: a process must not wait for an unreachable collector."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(LAST_SPANS_S)


def open_tracer(process: str, config: ServerConfig) -> Tracer | None:
    """Returns the tracer of a process; None if tracing is off."""
    return None if config.otlp_endpoint is None else Tracer(process, config.otlp_endpoint)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # the package that contains opentelemetry's exporter is missing
        return False
