"""Tools and calls in the form of OpenAI's chat API, and the parts that other APIs share."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, Literal, LiteralString

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.chat.broken_arguments import as_object, of_any_type
from moeserve.httpserver.generation.request.custom_tools import INPUT, custom_tool
from moeserve.httpserver.generation.request.foreign_history import without_unknown_types
from moeserve.httpserver.generation.request.tool_use import Tool, ToolUse
from moeserve.httpserver.transport.lone_surrogates import without_lone_surrogates
from moeserve.httpserver.transport.request_model import (
    MAX_VALUES,
    NO_EFFECT,
    FreeDict,
    JsonSchemaDict,
    Label,
    RequestModel,
    check_depth,
)
from moeserve.httpserver.transport.unknown_fields import HOSTED_TOOL

MAX_TOOLS: Final = 512
NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("parameters", 'must be a JSON Schema of "type": "object"')
    return schema


def without_hosted(tools: Any, info: ValidationInfo, *, known: Collection[str]) -> Any:
    """Returns the tools without hosted tools: those of types that the API's vendor would run itself and that this
    server does not have. The model answers without them. known: the types that are kept."""
    return without_unknown_types(tools, known, HOSTED_TOOL, info)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
Description = Annotated[str, Field(max_length=1 << 16)]
Parameters = Annotated[
    JsonSchemaDict,
    BeforeValidator(lambda schema: {} if schema == [] else schema),  # PHP's empty object
    AfterValidator(_of_an_object),
    Field(description="JSON Schema of the arguments."),
]


class FunctionDefinition(RequestModel):
    name: ToolName
    description: Description | None = None
    parameters: Parameters | None = None
    strict: Annotated[bool, Field(description="Arguments validate by construction.")] = False


class CustomDefinition(RequestModel):
    """A tool whose input is free text. Its grammar is described to the model but not enforced."""

    name: ToolName
    description: Description | None = None
    format: FreeDict | None = None


def _is_custom(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "custom"


def _wrapped(value: Any) -> Any:
    """Returns a tool or a tool choice in the chat API's form. The responses API writes the function's fields beside
    `type`."""
    kind = "custom" if _is_custom(value) else "function"
    if not isinstance(value, dict) or kind in value or "name" not in value:
        return value
    outer = {"type": value["type"]} if "type" in value else {}
    return {**outer, kind: {name: field for name, field in value.items() if name != "type"}}


def _of_its_kind(function: type[RequestModel], custom: type[RequestModel]) -> PlainValidator:
    """Reads an object whose type is the custom one as `custom`, and every other as `function`. (Pydantic's own
    discriminator would put the type into the names of wrong fields.)"""

    def read(value: Any, info: ValidationInfo) -> RequestModel:
        return (custom if _is_custom(value) else function).model_validate(value, context=info.context)

    return PlainValidator(read, json_schema_input_type=function | custom)


class ToolDefinition(RequestModel):
    """A tool. The function's fields may also be given in the tool itself, as some clients do."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    _flat = model_validator(mode="before")(_wrapped)

    def tool(self) -> Tool:
        return tool_of(self.function)


class CustomToolDefinition(RequestModel):
    type: Literal["custom"]
    custom: CustomDefinition

    _flat = model_validator(mode="before")(_wrapped)

    def tool(self) -> Tool:
        return custom_tool(self.custom.name, self.custom.description, self.custom.format)


def tool_of(function: FunctionDefinition) -> Tool:
    parameters = NO_PARAMETERS if function.parameters is None else {"type": "object"} | function.parameters
    return Tool(function.name, function.description, parameters, function.strict)


ChatTool = Annotated[
    ToolDefinition | CustomToolDefinition, _of_its_kind(ToolDefinition, CustomToolDefinition)
]
Tools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)]


class FunctionName(RequestModel):
    name: ToolName


class NamedToolChoice(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName

    _flat = model_validator(mode="before")(_wrapped)

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomChoice(RequestModel):
    type: Literal["custom"]
    custom: FunctionName

    _flat = model_validator(mode="before")(_wrapped)

    @property
    def name(self) -> str:
        return self.custom.name


Named = Annotated[NamedToolChoice | NamedCustomChoice, _of_its_kind(NamedToolChoice, NamedCustomChoice)]


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[Named], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestModel):
    """All tools stay in the prompt, and only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolMode = Literal["none", "auto", "required"]


def _kind_of_choice(choice: Any) -> str:
    kind = choice.get("type", "function") if isinstance(choice, dict) else getattr(choice, "type", "")
    return "allowed_tools" if kind == "allowed_tools" else "function"


def _in_openais_form(choice: Any) -> Any:
    """Returns the mode that {"type": "auto"} names, and OpenAI's form of Anthropic's choices (`any` is also Mistral's
    name of `required`): some clients send them."""
    if isinstance(choice, dict):
        if choice in [{"type": mode} for mode in ("none", "auto", "required", "any")]:
            choice = choice["type"]
        elif choice.keys() == {"type", "name"} and choice["type"] == "tool":
            choice = choice | {"type": "function"}
    return "required" if choice == "any" else choice


# The type decides which model reads a choice. Pydantic's own union tries each model in turn, and a wrong model would
# report the other model's fields as unknown.
ToolChoice = Annotated[
    ToolMode
    | Annotated[
        Annotated[Named, Tag("function")] | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
        Discriminator(_kind_of_choice),
    ],
    BeforeValidator(_in_openais_form),
]


def chat_tool_use(tools: list[Tool], choice: ToolChoice | None, parallel: bool) -> ToolUse:
    """Returns `tool_use` for the chat API's `tool_choice`."""
    match choice:
        case NamedToolChoice() | NamedCustomChoice():
            return tool_use(tools, None, parallel, name=choice.name)
        case AllowedToolsChoice(allowed_tools=AllowedTools(mode=mode, tools=named)):
            return tool_use(tools, mode, parallel, allowed=[one.name for one in named])
    return tool_use(tools, choice, parallel)


def tool_use(
    tools: list[Tool],
    mode: ToolMode | None,
    parallel: bool,
    *,
    name: str | None = None,
    allowed: Sequence[str] | None = None,
    params: tuple[LiteralString, LiteralString] = ("tools", "tool_choice"),
) -> ToolUse:
    """Returns the tools with the client's choice. name: the tool that must be called. allowed: the tools that may be
    called. params: the client's names of the fields of tools and choice, for messages. Raises PydanticCustomError for
    two tools of one name, and for a choice that names an unknown tool."""
    of_tools, of_choice = params
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError(of_tools, "every tool needs a name of its own")
    for chosen in [name] if name is not None else allowed or []:
        if chosen not in names:
            raise PydanticCustomError(of_choice, "there is no tool {name}", {"name": repr(chosen)})
    if name is not None:
        return ToolUse(tuple(tools), "named", name, parallel, of_tools)
    if mode == "required" and not tools:
        raise PydanticCustomError("tool_choice", "required needs tools")
    only = None if allowed is None else frozenset(allowed)
    return ToolUse(tuple(tools), mode or "auto", "", parallel, of_tools, only)


def _arguments_as_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(check_depth(value), ensure_ascii=False)


# OpenAI's clients send the arguments as JSON text, some others as an object.
CallArgumentsText = Annotated[
    str,
    BeforeValidator(_arguments_as_text, json_schema_input_type=str | FreeDict),
    Field(description="JSON text, or the object."),
]


def _arguments_as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        return of_any_type(value)
    try:
        return dict(check_depth(as_object(value)))
    except PydanticCustomError:  # nested too deep: shown as it was written
        return of_any_type(value)


# Clients of APIs that have an object send the text of a call that was cut off.
CallArgumentsObject = Annotated[
    FreeDict, BeforeValidator(_arguments_as_object, json_schema_input_type=FreeDict | str)
]


class FunctionCall(RequestModel):
    name: Annotated[str, Field(max_length=1024)]
    arguments: CallArgumentsText = "{}"


class ToolCallMessage(RequestModel):
    """A call that the model made in an earlier turn."""

    id: Label | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int | None, NO_EFFECT] = None  # clients send it back as they got it in a stream

    def for_template(self) -> dict[str, Any]:
        call = {"name": self.function.name, "arguments": arguments_for_template(self.function.arguments)}
        return {"type": "function", "function": call} | ({"id": self.id} if self.id else {})


class CustomCall(RequestModel):
    name: Annotated[str, Field(max_length=1024)]
    input: str = ""


class CustomCallMessage(RequestModel):
    """A call that the model made in an earlier turn, of a tool that takes free text."""

    id: Label | None = None
    type: Literal["custom"]
    custom: CustomCall
    index: Annotated[int | None, NO_EFFECT] = None

    def for_template(self) -> dict[str, Any]:
        call = {"name": self.custom.name, "arguments": {INPUT: self.custom.input}}
        return {"type": "function", "function": call} | ({"id": self.id} if self.id else {})


ChatToolCall = Annotated[
    ToolCallMessage | CustomCallMessage, _of_its_kind(ToolCallMessage, CustomCallMessage)
]


def arguments_for_template(text: str) -> Any:
    """Returns the arguments as an object, which all templates accept. Returns the unchanged text if it is not an object
    (the call was cut short) or has too many values (nine million empty lists took 15 s to parse)."""
    if text.count("[") + text.count("{") > MAX_VALUES:
        return text
    try:
        value = json.loads(without_lone_surrogates(text) or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
