"""The tools that a conversation has, and when the model may or must call them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moeserve.grammar import spec as grammar


@dataclass(frozen=True)
class Tool:
    name: str
    description: str | None
    parameters: Mapping[str, Any]  # JSON Schema
    is_strict: bool

    def for_template(self) -> dict[str, Any]:
        """OpenAI's form, which templates are written for."""
        described = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": self.parameters},
        }

    def for_grammar(self) -> grammar.Tool:
        return grammar.Tool(self.name, json.dumps(self.parameters))


@dataclass(frozen=True)
class ToolUse:
    """`choice` "named": only the tool called `name`, once."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True
    param: str = "tools"

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    def wish(self) -> grammar.GrammarSpec | None:
        """What has to hold by construction: every call where one must come, those of strict tools elsewhere."""
        tools = [tool.for_grammar() for tool in self.tools]
        match self.choice:
            case "required":
                return grammar.ToolCalls(tools, self.parallel)
            case "named":
                return grammar.ToolCalls([tool for tool in tools if tool.name == self.name], parallel=False)
            case "auto" if any(tool.is_strict for tool in self.tools):
                loose = grammar.ANY_OBJECT.schema
                shapes = [
                    shape if tool.is_strict else grammar.Tool(tool.name, loose)
                    for tool, shape in zip(self.tools, tools, strict=True)
                ]
                return grammar.TextWithToolCalls(shapes, self.parallel)
        return None
