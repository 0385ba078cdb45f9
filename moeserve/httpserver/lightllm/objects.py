"""The answers of LightLLM's API, as typed dicts."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.usage import Timings
from moeserve.messages.sampling import FinishReason


class GenerateToken(TypedDict):
    id: int | None
    text: str
    logprob: float | None
    special: bool
    count_output_tokens: NotRequired[int]
    prompt_tokens: NotRequired[int]


class GenerateResponse(TypedDict):
    """The response of /generate. With n > 1, each per-choice value is a list; `generated_text` is always a list."""

    generated_text: list[str]
    count_output_tokens: int | list[int]
    finish_reason: FinishReason | list[FinishReason | None] | None
    prompt_tokens: int
    tokens: NotRequired[list[GenerateToken] | list[list[GenerateToken]]]
    timings: NotRequired[Timings]


class GenerateEvent(TypedDict):
    """One token of /generate_stream. The last one has `details`."""

    token: GenerateToken
    generated_text: str | None
    finished: bool
    finish_reason: FinishReason | None
    details: Timings | None
