"""RequestRecord: the results of one HTTP request, for its log line and its span."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Scope

from moeserve.messages.sampling import FinishReason
from moeserve.messages.schema import GenerateRequest, Usage

_KEY: Final = "moeserve_record"  # in the scope's state


@dataclass(slots=True)
class RequestRecord:
    """The results of one request. `Access` creates the record, `EngineClient` writes the results of the request's
    generations, and `app.py` writes the error."""

    arrival: float  # time.monotonic()
    error: str = ""
    trace: str = ""  # traceparent of the request's span; "" if it is not traced
    generations: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None  # when the first token of any generation came
    finish_reasons: list[FinishReason] = field(default_factory=list)

    def started(self, requests: Sequence[GenerateRequest]) -> None:
        self.generations = len(requests)

    def token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now

    def ended(self, reason: FinishReason, usage: Usage) -> None:
        self.finish_reasons.append(reason)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the log line, without empty ones."""
        found: dict[str, Any] = {"error": self.error} if self.error else {}
        if self.generations:
            found |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "finish_reasons": self.finish_reasons,
            }
        if self.first_token_s is not None:
            found["first_token_ms"] = round(self.first_token_s * 1e3, 1)
        return found

    def text(self) -> str:
        """Returns the log line as a sentence."""
        parts = [self.error] if self.error else []
        if self.generations:
            first = "" if self.first_token_s is None else f", first token after {self.first_token_s:.3f} s"
            ends = ", ".join(dict.fromkeys(self.finish_reasons))
            parts.append(
                f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), "
                f"{self.completion_tokens} completion tokens ({ends}){first}"
            )
        return "; ".join(parts)


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record in a request's scope."""
    state = scope.setdefault("state", {})
    if _KEY not in state:
        state[_KEY] = RequestRecord(time.monotonic())
    record: RequestRecord = state[_KEY]
    return record
