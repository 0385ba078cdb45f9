"""The answers of the OpenAI API, as typed dicts.

mypy checks them, FastAPI documents them, orjson writes them directly. A pydantic model for each streamed token would
cost more than the token's detokenisation.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.logprobs import ChatLogprob, PromptLogprobs
from moeserve.httpserver.generation.usage import PromptProgress, Timings, UsageInfo
from moeserve.messages.sampling import FinishReason

ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class CompletionLogprobs(TypedDict):
    """Parallel lists over tokens. `text_offset`: the character of the returned text with which the token begins, or of
    which the token is a part."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """A choice. In a stream only the choice's first chunk has `prompt_token_ids`; it is null in the others."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    beam_score: NotRequired[float]  # of a beam search's answer
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """The complete answer, or a chunk of a stream; a stream has usage only on request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageInfo | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class CustomCall(TypedDict):
    name: str
    input: str


class ToolCall(TypedDict):
    """A call; its type says whether it has `function` or `custom`."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[FunctionCall]
    custom: NotRequired[CustomCall]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCallDelta(TypedDict):
    """A part of a call. The first delta has the call's id and name, and the others have pieces of its arguments. A
    custom tool's input comes in one delta, because it is known only when the call is complete."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class ChatMessage(TypedDict):
    """The answer's message. `reasoning` and `reasoning_content` hold the same text, if there was reasoning. `content`
    is null if the answer consists of calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[FunctionCall]  # where the request has `functions`


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    beam_score: NotRequired[float]  # of a beam search's answer


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    timings: Timings
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: NotRequired[str | int | None]


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageInfo | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]
