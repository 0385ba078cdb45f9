"""Turns the tools of /v1/responses into functions for the model, and the functions' calls into the items that the
client expects.

Models get functions only. A namespace becomes several functions. A custom tool, whose input is free text, and the tools
of `client_tools` become functions whose parameters are the fields of their call items. Tools of other types run at
OpenAI and are left out.

Source: OpenAI's API reference (Responses) and its Python client's types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from moeserve.httpserver.generation.chat.chat_tools import (
    MAX_TOOLS,
    Description,
    FunctionDefinition,
    Parameters,
    ToolName,
    tool_of,
    without_hosted,
)
from moeserve.httpserver.generation.request.custom_tools import custom_tool
from moeserve.httpserver.generation.request.foreign_history import types_of
from moeserve.httpserver.generation.request.tool_use import Tool
from moeserve.httpserver.responses.client_tools import CLIENT_TOOLS, ToolKind
from moeserve.httpserver.transport.request_model import Advisory, FreeDict, RequestModel, unsupported

Kind = Literal["function", "custom"] | ToolKind

_ALL_LOADED: Final = Advisory("Has no effect: all tools are in the prompt.")


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: Parameters | None = None
    strict: Annotated[bool, Field(description="Arguments validate by construction. Default: false.")] = False

    defer_loading: Annotated[bool, _ALL_LOADED] = False
    allowed_callers: Annotated[Any, unsupported("other callers", ["direct"])] = None
    output_schema: Annotated[Any, unsupported("output_schema")] = None

    def for_model(self, name: str) -> Tool:
        return tool_of(
            FunctionDefinition(
                name=name, description=self.description, parameters=self.parameters, strict=self.strict
            )
        )


class CustomTool(RequestModel):
    """A tool whose input is free text. Its grammar is described to the model but not enforced."""

    type: Literal["custom"]
    name: ToolName
    description: Description | None = None
    format: FreeDict | None = None

    defer_loading: Annotated[bool, _ALL_LOADED] = False
    allowed_callers: Annotated[Any, unsupported("other callers", ["direct"])] = None

    def for_model(self, name: str) -> Tool:
        return custom_tool(name, self.description, self.format)


class Environment(RequestModel):
    """The environment in which a shell's commands run."""

    type: Annotated[Any, unsupported("an environment that is not the client's", "local")] = "local"
    skills: Annotated[Any, unsupported("skills", [])] = None


class KnownTool(RequestModel):
    """A tool that is named by its type only, and that the client runs."""

    type: ToolKind
    environment: Environment | None = None
    allowed_callers: Annotated[Any, unsupported("other callers", ["direct"])] = None

    def for_model(self, name: str) -> Tool:
        known = CLIENT_TOOLS[self.type]
        return Tool(name, known.description, known.parameters, is_strict=False)


class NamespaceTool(RequestModel):
    type: Literal["namespace"]
    name: ToolName
    description: Description | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        BeforeValidator(partial(without_hosted, known=types_of(FunctionTool | CustomTool))),
        Field(max_length=MAX_TOOLS),
    ]


AnyTool = FunctionTool | CustomTool | KnownTool | NamespaceTool
ResponseTools = Annotated[
    list[Annotated[AnyTool, Field(discriminator="type")]],
    BeforeValidator(partial(without_hosted, known=types_of(AnyTool))),
    Field(max_length=MAX_TOOLS, description="Those of other types, which run at OpenAI, are left out."),
]


class ToolReference(RequestModel):
    """The name of a tool that must or may be called."""

    type: Kind
    name: ToolName | None = None
    namespace: ToolName | None = None


class AllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolReference], Field(min_length=1, max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool with the name that the model sees and its name in the client's request."""

    tool: Tool
    kind: Kind
    name: str
    namespace: str | None = None


class Toolbox:
    """The functions that a request's tools become for the model. A namespace's function keeps its name; if another tool
    has the same name, the namespace's name is put before it."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        flat: list[tuple[FunctionTool | CustomTool | KnownTool, str | None]] = []
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                flat += [(inner, tool.name) for inner in tool.tools]
            else:
                flat.append((tool, None))
        taken = Counter(_name_of(tool) for tool, _ in flat)
        self.offered: list[Offered] = []
        for tool, namespace in flat:
            name = _name_of(tool)
            shown = name if namespace is None or taken[name] == 1 else f"{namespace}.{name}"
            self.offered.append(Offered(tool.for_model(shown), tool.type, name, namespace))
        self._by_shown = {offered.tool.name: offered for offered in self.offered}
        self._by_name = {(one.namespace, one.name): one.tool.name for one in self.offered}

    @property
    def tools(self) -> list[Tool]:
        return [offered.tool for offered in self.offered]

    def called(self, shown: str) -> Offered | None:
        """Returns the tool that the model called by the name `shown`; None for an unknown name."""
        return self._by_shown.get(shown)

    def shown(self, name: str, namespace: str | None = None) -> str:
        """Returns the name that the model sees for a tool, also for a tool that only an earlier request had."""
        return self._by_name.get((namespace, name), name)

    def referenced(self, references: Iterable[ToolReference]) -> list[str]:
        return [self.shown(one.name or one.type, one.namespace) for one in references]


def _name_of(tool: FunctionTool | CustomTool | KnownTool) -> str:
    return tool.type if isinstance(tool, KnownTool) else tool.name
