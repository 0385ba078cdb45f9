"""The span of a request's generations, after OpenTelemetry's conventions for generative AI.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from moeserve.httpserver.observability.request_record import RequestRecord
from moeserve.messages.schema import GenerateRequest
from moeserve.processes.tracing import Attributes, Span, Tracer

Operation = Literal["chat", "text_completion"]  # gen_ai.operation.name


def begin(
    tracer: Tracer, parent: str, operation: Operation, model: str, requests: Sequence[GenerateRequest]
) -> Span:
    """Begins the span now. It contains no prompts or answers, which are private."""
    attributes = {"gen_ai.operation.name": operation, **_parameters(model, requests)}
    return tracer.begin(f"{operation} {model}", parent, time.monotonic(), attributes)


def end(span: Span, record: RequestRecord) -> None:
    """Ends the span now."""
    attributes: dict[str, int | float | Sequence[str]] = {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.response.finish_reasons": list(record.finish_reasons),
    }
    if record.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    span.set(attributes)
    if record.error:
        span.set({"error.type": "error"})
        span.fail(record.error)
    span.end(time.monotonic())


def _parameters(model: str, requests: Sequence[GenerateRequest]) -> Attributes:
    sampling, text = requests[0].sampling, requests[0].text
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.provider.name": "moeserve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.choice.count": len(requests),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.seed": sampling.seed,
    }
    if text.stop:
        attributes["gen_ai.request.stop_sequences"] = list(text.stop)
    return attributes
