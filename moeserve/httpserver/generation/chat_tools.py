"""Tools and calls as OpenAI's chat API has them, and the parts of them that other APIs share."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.tool_use import Tool, ToolUse
from moeserve.httpserver.transport.request_model import (
    MAX_VALUES,
    NO_EFFECT,
    JsonSchemaDict,
    Label,
    RequestModel,
)

MAX_TOOLS: Final = 512
NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("parameters", 'must be a JSON Schema of "type": "object"')
    return schema


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
Description = Annotated[str, Field(max_length=1 << 16)]
Parameters = Annotated[
    JsonSchemaDict, AfterValidator(_of_an_object), Field(description="JSON Schema of the arguments.")
]


class FunctionDefinition(RequestModel):
    name: ToolName
    description: Description | None = None
    parameters: Parameters | None = None
    strict: Annotated[bool, Field(description="Arguments validate by construction.")] = False


class ToolDefinition(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition

    def tool(self) -> Tool:
        return tool_of(self.function)


def tool_of(function: FunctionDefinition) -> Tool:
    parameters = NO_PARAMETERS if function.parameters is None else {"type": "object"} | function.parameters
    return Tool(function.name, function.description, parameters, function.strict)


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)]


class FunctionName(RequestModel):
    name: ToolName


class NamedToolChoice(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def tool_use(tools: list[Tool], choice: ToolChoice | None, parallel: bool) -> ToolUse:
    """Raises PydanticCustomError for tools of the same name, and for a choice that names no tool."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError("tools", "every tool needs a name of its own")
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            message = "there is no tool {name}"
            raise PydanticCustomError("tool_choice", message, {"name": repr(choice.function.name)})
        return ToolUse(tuple(tools), "named", choice.function.name, parallel)
    if choice == "required" and not tools:
        raise PydanticCustomError("tool_choice", "required needs tools")
    return ToolUse(tuple(tools), choice or "auto", "", parallel)


class FunctionCall(RequestModel):
    name: Annotated[str, Field(max_length=1024)]
    arguments: Annotated[str, Field(description="JSON text.")] = "{}"


class ToolCallMessage(RequestModel):
    """A call that the model made in an earlier turn."""

    id: Label | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int | None, NO_EFFECT] = None  # clients send back what a stream gave them

    def for_template(self) -> dict[str, Any]:
        call = {"name": self.function.name, "arguments": arguments_for_template(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": call}


def arguments_for_template(text: str) -> Any:
    """Returns the arguments as an object, which all templates take; as the text itself if it is no object (a call that
    was cut short) or holds too many values (nine million empty lists took 15 s to parse)."""
    if text.count("[") + text.count("{") > MAX_VALUES:
        return text
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
