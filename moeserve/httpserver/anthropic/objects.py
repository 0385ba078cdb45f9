"""The answers of /v1/messages, as typed dicts."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesUsage(TypedDict):
    """`input_tokens`: prompt tokens that were computed; the other input fields count tokens read from the prefix
    cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class ContentBlock(TypedDict):
    """A block. Its fields by type: thinking has `thinking` and `signature`; text has `text`; tool_use has `id`, `name`
    and `input`."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    text: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class AppliedEdit(TypedDict):
    """The parts that a context edit left out of the prompt."""

    type: str
    cleared_tool_uses: NotRequired[int]
    cleared_thinking_turns: NotRequired[int]
    cleared_input_tokens: int


class AppliedEdits(TypedDict):
    applied_edits: list[AppliedEdit]


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    context_management: NotRequired[AppliedEdits]  # where the request has it


class MessageEvent(TypedDict):
    """An event: message_start, ping, content_block_start, content_block_delta, content_block_stop, message_delta,
    message_stop or error. Its fields are named as in Anthropic's reference."""

    type: str


class OriginalCount(TypedDict):
    original_input_tokens: int  # before the context edits


class TokenCount(TypedDict):
    input_tokens: int
    context_management: NotRequired[OriginalCount]  # where the request has it
