"""GrammarSpec: the form that an answer must have, and its translation to llguidance's notation.

Sources: JSON Schema 2020-12 as far as llguidance implements it (it refuses what it does not); regular expressions
of Rust's `regex` crate, anchored at both ends; llguidance's dialect of Lark, or GBNF, its older form; for tools the
format of Qwen3's chat template (Hermes).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import llguidance
import msgspec

from .errors import GrammarError

TOOL_OPEN: Final = "<tool_call>"
TOOL_CLOSE: Final = "</tool_call>"
# Between the parts of a JSON text: enough to indent, not enough for a model that has lost its way to fill its
# answer with blanks. None before or after the text.
_WHITESPACE: Final = r"[ \t\r\n]{1,40}"
_ANYTHING: Final = "/(?s:.*)/"
_CALL: Final = f'call: "{TOOL_OPEN}" body\n'


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """A JSON text that validates against `schema`, itself JSON text: an object or a boolean."""

    schema: str


class Regex(msgspec.Struct, frozen=True, tag=True):
    pattern: str


class Ebnf(msgspec.Struct, frozen=True, tag=True):
    """Lark or GBNF, told apart by `::=`."""

    text: str


class Choice(msgspec.Struct, frozen=True, tag=True):
    options: list[str]


class GrammarTool(msgspec.Struct, frozen=True, array_like=True):
    name: str
    schema: str  # of its arguments, JSON text


class ToolCalls(msgspec.Struct, frozen=True, tag=True):
    """Only calls of these tools: exactly one, or with `parallel` at least one."""

    tools: list[GrammarTool]
    parallel: bool


class TextWithToolCalls(msgspec.Struct, frozen=True, tag=True):
    """Free text; every call in it is a valid call of one of these tools."""

    tools: list[GrammarTool]
    parallel: bool


class JsonOrToolCalls(msgspec.Struct, frozen=True, tag=True):
    """A JSON text that validates, or calls of these tools."""

    schema: str
    tools: list[GrammarTool]
    parallel: bool


GrammarSpec = JsonSchema | Regex | Ebnf | Choice | ToolCalls | TextWithToolCalls | JsonOrToolCalls
ANY_OBJECT: Final = JsonSchema('{"type": "object"}')


def to_grammar(spec: GrammarSpec) -> str:
    """Returns the grammar text that `engine.GrammarEngine.matcher` takes. Raises GrammarError for a spec that has
    none; most mistakes are found when the grammar is compiled."""
    match spec:
        case JsonSchema(schema=schema):
            return json.dumps({"grammars": [{"json_schema": _schema(schema)}]})
        case Regex(pattern=pattern):
            return llguidance.LLMatcher.grammar_from_regex(pattern)
        case Ebnf(text=text):
            return _lark(text)
        case Choice(options=options):
            return "start: " + " | ".join(map(_literal, options))
        case ToolCalls(tools=tools, parallel=parallel):
            return f"start: {_calls(parallel)}\n" + _CALL + _bodies(tools)
        case TextWithToolCalls(tools=tools, parallel=parallel):
            start = "start: call* TEXT\n" if parallel else "start: TEXT | call\n"
            opening = f"opening[lazy]: /(?s:.*){TOOL_OPEN}/\n"
            return f"{start}call: opening body\n{opening}TEXT: {_ANYTHING}\n" + _bodies(tools)
        case JsonOrToolCalls(schema=schema, tools=tools, parallel=parallel):
            answer = f"answer: %json {json.dumps(_schema(schema))}\n"
            return f"start: answer | {_calls(parallel)}\n{answer}" + _CALL + _bodies(tools)


def _calls(parallel: bool) -> str:
    return 'call ("\\n" call)*' if parallel else "call"


def _lark(text: str) -> str:
    """Translates GBNF to Lark; its parser may fail in any way on text that is not GBNF."""
    if "::=" not in text:
        return text
    try:
        return llguidance.grammar_from("gbnf", text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from error


def _schema(text: str) -> Any:
    """Adds our bound on white space, unless the schema sets its own in llguidance's `x-guidance`."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance")
    return schema | {
        "x-guidance": {"whitespace_pattern": _WHITESPACE} | (own if isinstance(own, dict) else {})
    }


def _bodies(tools: Sequence[GrammarTool]) -> str:
    """Returns the rules for the text after `<tool_call>`, one a tool, in the form of Qwen3's template."""
    lines = ["body: " + " | ".join(f"tool_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
        tail = "}\n" + TOOL_CLOSE
        lines.append(f"tool_{i}: {_literal(head)} arguments_{i} {_literal(tail)}")
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(tool.schema))}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """Quotes a string for Lark, whose strings are written as JSON's."""
    return json.dumps(text)
