"""The request of OpenAI's /v1/responses, its items, and their way to a Conversation.

Source: OpenAI's API reference (Responses) and its Python client's types. Items are kept in the API's own form, in
the store too, so that a stored conversation is read by the same code as one that a client sends.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat_formats import Thought
from moeserve.httpserver.generation.chat_tools import (
    MAX_TOOLS,
    Description,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Parameters,
    ToolName,
    arguments_for_template,
    tool_of,
    tool_use,
)
from moeserve.httpserver.generation.structured_output import Constraint
from moeserve.httpserver.generation.thinking import Effort, thought_of
from moeserve.httpserver.generation.tool_use import ToolUse
from moeserve.httpserver.openai.chat_body import MAX_MESSAGES, MAX_TOP_LOGPROBS
from moeserve.httpserver.transport.request_model import (
    INT32_MAX,
    NO_EFFECT,
    CacheSalt,
    FreeDict,
    JsonSchemaDict,
    Label,
    ModelName,
    RequestModel,
    unsupported,
)

MAX_PARTS: Final = 1024
ResponseId = Annotated[str, Field(pattern=r"^resp_[\x21-\x7e]{1,160}$")]


# ---------------------------------------------------------------- items


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str


class OutputText(RequestModel):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[FreeDict], NO_EFFECT, Field(max_length=MAX_PARTS, default_factory=list)]
    logprobs: Annotated[Any, NO_EFFECT] = None


def _text_of(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _to_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Part = Annotated[InputText | OutputText, Field(discriminator="type")]
Parts = Annotated[
    list[Part],
    BeforeValidator(_to_parts, json_schema_input_type=str | list[Part]),
    Field(max_length=MAX_PARTS),
]


class _Item(RequestModel):
    id: Label | None = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, NO_EFFECT] = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Annotated[Literal["commentary", "final_answer"] | None, NO_EFFECT] = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Label
    name: Annotated[str, Field(max_length=1024)]
    arguments: Annotated[str, Field(description="JSON text.")]


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: str | Annotated[list[InputText], Field(max_length=MAX_PARTS)]


class SummaryText(RequestModel):
    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """A thought of an earlier turn; its text is in `content`, or else in `encrypted_content`."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], NO_EFFECT, Field(max_length=MAX_PARTS, default_factory=list)]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, default_factory=list)]
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _is_ours(self) -> ReasoningItem:
        self.text()
        return self

    def text(self) -> str:
        if self.content or self.encrypted_content is None:
            return "".join(part.text for part in self.content)
        try:
            return base64.b64decode(self.encrypted_content, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            message = "is not from this server: leave the item out"
            raise PydanticCustomError("encrypted_content", message) from error


def opaque(thought: str) -> str:
    """`encrypted_content`: the thought in a form to be sent back. It is the client's own; nothing is hidden."""
    return base64.b64encode(thought.encode()).decode()


def _typed(item: Any) -> Any:
    """A message may leave its type out, and give its text as it is."""
    if not isinstance(item, dict) or "role" not in item:
        return item
    if item["role"] == "assistant" and isinstance(item.get("content"), str):
        item = item | {"content": [{"type": "output_text", "text": item["content"]}]}
    return {"type": "message"} | item


Item = Annotated[
    Annotated[
        MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")
    ],
    BeforeValidator(_typed),
]
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])


def stored_items(items: list[dict[str, Any]]) -> list[Item]:
    """Items out of the store, which have been items before."""
    return _ITEMS.validate_python(items)


def _to_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def messages_of(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """As templates take them. What the model put out in one turn (a thought, a text, calls) is one message."""
    messages: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
    turn: dict[str, Any] | None = None  # the model's, where the last items are its own
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            output = {"role": "tool", "content": _text_of(item.output), "tool_call_id": item.call_id}
            messages.append(output)
            turn = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text_of(item.content)})
            turn = None
            continue
        if turn is None or ("tool_calls" in turn and not isinstance(item, FunctionCallItem)):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        _add(turn, item)
    return messages


def _add(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    match item:
        case MessageItem():
            turn["content"] += _text_of(item.content)
        case ReasoningItem():
            turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text()
        case FunctionCallItem():
            function = {"name": item.name, "arguments": arguments_for_template(item.arguments)}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


# ---------------------------------------------------------------- the request


class ResponseTool(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: Parameters | None = None
    strict: Annotated[bool, Field(description="Arguments validate by construction. Default: false.")] = False

    defer_loading: Annotated[Any, unsupported("defer_loading", False)] = None
    allowed_callers: Annotated[Any, unsupported("other callers", ["direct"])] = None
    output_schema: Annotated[Any, unsupported("output_schema")] = None


class ResponseToolName(RequestModel):
    type: Literal["function"]
    name: ToolName


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[Label | None, Field(description="For the client's own use.")] = None
    description: Annotated[str | None, Field(description="For the client's own use.")] = None
    schema_: Annotated[JsonSchemaDict | None, Field(alias="schema")] = None
    strict: Annotated[bool, Field(description="Answers validate by construction either way.")] = True

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("schema", "goes with type json_schema, and only with it")
        return self


class TextConfig(RequestModel):
    format: TextFormat = TextFormat()
    verbosity: Annotated[Any, unsupported("verbosity", "medium")] = None


class ReasoningConfig(RequestModel):
    effort: Effort | None = None
    summary: Annotated[Any, unsupported("a summary", "auto")] = None
    generate_summary: Annotated[Any, unsupported("a summary", "auto")] = None
    context: Annotated[Any, unsupported("another context", "auto")] = None
    mode: Annotated[Any, unsupported("another mode", "standard")] = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Annotated[bool, NO_EFFECT] = False


Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class InputTokensRequest(RequestModel):
    """All that makes the prompt."""

    model: ModelName | None = None
    input: Annotated[
        list[Item],
        BeforeValidator(_to_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1, max_length=MAX_MESSAGES, description="A text of the user, or items."),
    ]
    instructions: Annotated[
        str | None, Field(description="The system message; not taken over from earlier responses.")
    ] = None
    previous_response_id: ResponseId | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, default_factory=list)]
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName = "auto"
    parallel_tool_calls: Annotated[bool, Field(description="False: at most one call.")] = True
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    truncation: Annotated[Any, unsupported("truncation", "disabled")] = "disabled"
    conversation: Annotated[Any, unsupported("conversation (use previous_response_id)")] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> InputTokensRequest:
        self.tool_use()
        return self

    def tool_use(self) -> ToolUse:
        tools = [
            tool_of(
                FunctionDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=tool.strict,
                )
            )
            for tool in self.tools
        ]
        choice = self.tool_choice
        if isinstance(choice, ResponseToolName):
            named = NamedToolChoice(function=FunctionName(name=choice.name))
            return tool_use(tools, named, self.parallel_tool_calls)
        return tool_use(tools, choice, self.parallel_tool_calls)

    def thought(self) -> Thought:
        return thought_of(self.reasoning.effort, None, {}, "reasoning.effort")

    def constraint(self) -> Constraint | None:
        format = self.text.format
        if format.schema_ is not None:
            return Constraint(grammar.JsonSchema(json.dumps(format.schema_)), "text.format.schema")
        return Constraint(grammar.ANY_OBJECT, "text.format") if format.type == "json_object" else None


class ResponsesRequest(InputTokensRequest):
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: Annotated[bool, Field(description="Keep the response for previous_response_id and GET.")] = True
    max_output_tokens: Annotated[
        int | None, Field(ge=1, le=INT32_MAX, description="Default: the rest of the context.")
    ] = None
    temperature: Annotated[float, Field(ge=0, le=2, description="0 is greedy.")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_logprobs: Annotated[
        int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="With include message.output_text.logprobs.")
    ] = 0
    include: Annotated[list[Include], Field(max_length=8, default_factory=list)]

    cache_salt: CacheSalt = ""

    metadata: Annotated[FreeDict, Field(description="Comes back as it is.", default_factory=dict)]
    user: Annotated[Label | None, NO_EFFECT] = None
    safety_identifier: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_retention: Annotated[Label | None, NO_EFFECT] = None
    prompt_cache_options: Annotated[FreeDict | None, NO_EFFECT] = None
    service_tier: Annotated[Label | None, NO_EFFECT] = None
    client_metadata: Annotated[FreeDict | None, NO_EFFECT] = None

    background: Annotated[Any, unsupported("background", False)] = False
    prompt: Annotated[Any, unsupported("prompt (stored templates)")] = None
    max_tool_calls: Annotated[Any, unsupported("max_tool_calls (of tools that run at OpenAI)")] = None
    context_management: Annotated[Any, unsupported("context_management", [])] = None
    moderation: Annotated[Any, unsupported("moderation")] = None
    access_programs: Annotated[Any, unsupported("access_programs")] = None
    image: Annotated[Any, unsupported("image")] = None

    @model_validator(mode="after")
    def _logprobs_are_included(self) -> ResponsesRequest:
        if self.top_logprobs and "message.output_text.logprobs" not in self.include:
            raise PydanticCustomError("top_logprobs", "needs include message.output_text.logprobs")
        return self
