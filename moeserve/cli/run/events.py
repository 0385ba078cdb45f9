"""The events of a streamed chat completion, read from its server-sent events. The server is not trusted: every value
may have a wrong type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from moeserve.errors import UserError

_DATA: Final = b"data:"
_LOADING: Final = b": loading"  # a comment that a server of several models sends
_DONE: Final = b"[DONE]"


class ChatError(UserError):
    """A question was not answered, or its answer was cut off. `code` is the server's error code, if there is one."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class NoServer(ChatError):
    """Nothing listens at the server's address."""


@dataclass(frozen=True)
class Piece:
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Waiting:
    """The reason why the request waits, such as "loading: weights 40%"."""

    text: str


@dataclass(frozen=True)
class PromptProgress:
    """Progress of the prompt, in tokens."""

    processed: int
    total: int


@dataclass(frozen=True)
class Figures:
    """Token counts, and tokens per second if the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    prefill_rate: float | None = None
    decode_rate: float | None = None


@dataclass(frozen=True)
class End:
    finish_reason: str


Event = Piece | Waiting | PromptProgress | Figures | End


@dataclass
class EventReader:
    """Reads lines of the stream. `is_complete`: the answer has ended; `is_closed`: nothing more follows in the
    stream."""

    is_complete: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)

    def events(self, line: bytes) -> Iterator[Event]:
        """Yields the events of a streamed answer. Raises ChatError for an error of the server or a malformed event."""
        if line.startswith(_LOADING):
            yield Waiting(line[1:].decode(errors="replace").strip())
        if not line.startswith(_DATA):
            return  # another comment, or the empty line between two events
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            self.is_complete = self.is_closed = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise ChatError(
                "the server sent something that is not an answer; check its address (--url)"
            ) from error
        if not isinstance(chunk, dict):
            raise ChatError("the server sent something that is not an answer; check its address (--url)")
        if chunk.get("error") is not None:
            raise error_of(chunk)
        yield from self._of_chunk(chunk)

    def _of_chunk(self, chunk: dict[str, Any]) -> Iterator[Event]:
        progress = _object(chunk.get("prompt_progress"))
        if progress:
            yield PromptProgress(_int(progress.get("processed")), _int(progress.get("total")))
        choices = chunk.get("choices")
        choice = _object(choices[0]) if isinstance(choices, list) and choices else {}
        delta = _object(choice.get("delta"))
        piece = Piece(
            _text(delta.get("content")),
            _text(delta.get("reasoning")) or _text(delta.get("reasoning_content")),
        )
        if piece != Piece():
            yield piece
        if isinstance(choice.get("finish_reason"), str):
            self.is_complete = True
            yield End(choice["finish_reason"])
        if usage := _object(chunk.get("usage")):
            yield _figures(usage, _object(chunk.get("timings")))


def _figures(usage: dict[str, Any], timings: dict[str, Any]) -> Figures:
    cached = _object(usage.get("prompt_tokens_details")).get("cached_tokens")
    return Figures(
        _int(usage.get("prompt_tokens")),
        _int(usage.get("completion_tokens")),
        None if cached is None else _int(cached),
        _rate(timings.get("prefill_tokens_per_second")),
        _rate(timings.get("decode_tokens_per_second")),
    )


def error_of(body: Any) -> ChatError:
    """Returns the error in a JSON answer, in OpenAI's form or a similar one."""
    error = _object(body).get("error")
    if isinstance(error, str):
        return ChatError(f"the server says: {error}")
    found = _object(error)
    message, code = found.get("message"), found.get("code")
    told = f"the server says: {message}" if isinstance(message, str) and message else "the server failed"
    return ChatError(told, code if isinstance(code, str) else None)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _rate(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
