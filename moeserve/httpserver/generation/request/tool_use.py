"""The tools of a conversation, and whether the model may or must call them."""

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
        """Returns OpenAI's form, which templates expect."""
        described = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": self.parameters},
        }

    def for_grammar(self) -> grammar.GrammarTool:
        return grammar.GrammarTool(self.name, json.dumps(self.parameters))


@dataclass(frozen=True)
class ToolUse:
    """A request's tools and its choice. If `choice` is "named", the model calls the tool `name` exactly once."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True
    param: str = "tools"  # the client's name, for messages
    allowed: frozenset[str] | None = None  # the tools that may be called; None: all

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    @property
    def callable(self) -> list[Tool]:
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]

    def grammar_spec(self) -> grammar.GrammarSpec | None:
        """Returns the grammar that guarantees valid calls; None if no call needs a grammar. The grammar covers all
        tools if a call is required, else only strict tools. It excludes calls of tools that are not allowed."""
        tools = [tool.for_grammar() for tool in self.callable]
        match self.choice:
            case "required":
                return grammar.ToolCalls(tools, self.parallel)
            case "named":
                return grammar.ToolCalls([tool for tool in tools if tool.name == self.name], parallel=False)
            case "auto" if self.allowed is not None or any(tool.is_strict for tool in self.tools):
                return self.any_call()
        return None

    def any_call(self) -> grammar.TextWithToolCalls:
        """Returns the grammar of text with any number of calls. Calls of strict tools must match the tools' schemas."""
        loose = grammar.ANY_OBJECT.schema
        shapes = [
            tool.for_grammar() if tool.is_strict else grammar.GrammarTool(tool.name, loose)
            for tool in self.callable
        ]
        return grammar.TextWithToolCalls(shapes, self.parallel)
