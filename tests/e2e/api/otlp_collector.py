"""An OTLP/HTTP collector: takes POST /v1/traces, as any real one does, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class SeenSpan:
    process: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: float  # seconds
    end: float
    failed: bool
    attributes: dict[str, Any]


class Collector:
    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.paths: set[str] = set()
        self.services: set[str] = set()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {one.key: _value(one.value) for one in group.resource.attributes}
            self.services.add(resource["service.name"])
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SeenSpan(
                            process=resource["service.instance.id"],
                            name=span.name,
                            trace=span.trace_id.hex(),
                            id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            kind=span.kind,
                            start=span.start_time_unix_nano / 1e9,
                            end=span.end_time_unix_nano / 1e9,
                            failed=span.status.code == 2,
                            attributes={one.key: _value(one.value) for one in span.attributes},
                        )
                    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.add(self.path)
            collector.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.http.shutdown()
        collector.http.server_close()
        thread.join(30)
