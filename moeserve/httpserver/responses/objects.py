"""The answers of /v1/responses, as typed dicts."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from moeserve.httpserver.generation.logprobs import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ContentPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChatLogprob]]


class OutputItem(TypedDict):
    """An item. Its fields by type: message: `role`, `content`; reasoning: `summary`, `content` and, if asked for,
    `encrypted_content`; function_call: `call_id`, `name`, `arguments`; custom_tool_call: `call_id`, `name`, `input`;
    local_shell_call and shell_call: `call_id`, `action`; apply_patch_call: `call_id`, `operation`. A call of a tool in
    a namespace also has `namespace`."""

    id: str
    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
    ]
    status: ItemStatus
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[ContentPart]]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[str]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    action: NotRequired[dict[str, Any]]
    operation: NotRequired[dict[str, Any]]


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseFailure(TypedDict):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(TypedDict):
    """The response. As at OpenAI, it repeats the request's parameters."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """A named event, with the fields of OpenAI's reference."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int
