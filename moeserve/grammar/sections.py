"""The grammar of Kimi-K3's answers: sections between tags of control tokens and words.

A text can contain no control token, so it ends at the next tag.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from .json_schema.enforced import MAX_BOUNDED, enforced
from .lark_text import literal, pieces
from .spec import ANY_OBJECT, GrammarTool, Piece, Sections, TaggedArgument

_ANYTHING: Final = "/(?s:.*)/"
_ANY_KEY: Final = r"/[\w.:-]{1,64}/"
_INDEX: Final = "/[0-9]{1,4}/"
# The words of an argument's type for values that are no strings.
_TYPES: Final = ("number", "boolean", "null", "object", "array")


class SectionRules:
    """The rules of one answer. `answer_rule`: the name of a grammar that the response must match; None: any text."""

    def __init__(self, spec: Sections, answer_rule: str | None) -> None:
        self._spec = spec
        self._answer = answer_rule or "TEXT"
        self._open, self._close, self._sep = (
            spec.tokens[word] for word in ("<|open|>", "<|close|>", "<|sep|>")
        )
        self._values: dict[str, str] = {}  # text of a value's rule → its name
        schemas = {tool.schema for tool in spec.tools}
        schemas |= {
            one.schema for tool in spec.tools for one in tool.arguments or () if one.schema is not None
        }
        self._bounds_integers = len(schemas) <= MAX_BOUNDED

    def lines(self) -> list[str]:
        """Returns the grammar of the text after `spec.begun`."""
        response = f"{self._opened('response')} responded"
        reasoned = f"think_text {self._closed('think')} {response}"
        match self._spec.begun:
            case "think":
                start = reasoned
            case "response":
                start = "responded"
            case _:
                message = self._opened('message role="assistant"')
                start = f"{message} ({self._opened('think')} {reasoned} | {response})"
        most = self._spec.max_reasoning
        bound = f"[max_tokens={most}]" if most else ""
        lines = [
            f"start: {start}",
            f"think_text{bound}: {literal('') if most == 0 else _ANYTHING}",
            f"TEXT: {_ANYTHING}",
            f"responded: {self._response()} {self._closed('message')}",
        ]
        if self._spec.tools:
            calls = "call+" if self._spec.parallel else "call"
            lines.append(f"tools: {self._opened('tools')} {calls} {self._closed('tools')}")
            lines.append("call: " + " | ".join(f"tool_{at}" for at in range(len(self._spec.tools))))
            lines += [f"INDEX: {_INDEX}", f"ANY_KEY: {_ANY_KEY}"]
            lines += [self._tool(at, tool) for at, tool in enumerate(self._spec.tools)]
            lines += [f"{name}{rule}" for rule, name in self._values.items()]
        return lines

    def _response(self) -> str:
        """Returns the expression for the response's text, its closing tag and the calls behind it."""
        ended = self._closed("response")
        if not self._spec.tools:
            return f"{self._answer} {ended}"
        if self._spec.must_call:
            return f"TEXT {ended} tools"
        if self._spec.answer is None:
            return f"TEXT {ended} tools?"
        return f"({self._answer} {ended} | {ended} tools)"

    def _opened(self, text: str) -> str:
        return pieces([self._open, text, self._sep])

    def _closed(self, text: str) -> str:
        return pieces([self._close, text, self._sep])

    def _tool(self, at: int, tool: GrammarTool) -> str:
        begin = pieces([self._open, f'call tool={_quoted(tool.name)} index="'])
        head = f"{begin} INDEX {self._head_end()}"
        if tool.arguments is not None:
            arguments = " ".join(
                self._argument(one) if one.is_required else f"({self._argument(one)})?"
                for one in tool.arguments
            )
        elif tool.schema == ANY_OBJECT.schema:
            arguments = f"({self._any_argument()})*"
        else:
            value = self._value(f": %json {enforced(tool.schema, bounds_integers=self._bounds_integers)}")
            arguments = f"{self._opened('json type=' + _quoted('object'))} {value} {self._closed('json')}"
        return f"tool_{at}: {head} {arguments} {self._closed('call')}"

    def _any_argument(self) -> str:
        begin, middle = pieces([self._open, 'argument key="']), literal('" type="')
        kinds = " | ".join(map(literal, ("string", *_TYPES)))
        head = f"{begin} ANY_KEY {middle} ({kinds}) {self._head_end()}"
        return f"{head} TEXT {self._closed('argument')}"

    def _argument(self, argument: TaggedArgument) -> str:
        """Returns the expression for an argument with its tags. Its value may have several forms, each with the types
        that the tag may name."""
        ways = []
        if argument.schema is not None:
            ways.append(self._typed(argument.key, argument.schema))
        elif argument.words is None:
            ways.append(f"{self._headed(argument.key, ['string'])} {self._text(argument)}")
        elif argument.words:
            words = self._value(": " + " | ".join(map(literal, argument.words)))
            ways.append(f"{self._headed(argument.key, ['string'])} {words}")
        if argument.other_schema is not None:
            ways.append(self._typed(argument.key, argument.other_schema))
        return f"({' | '.join(ways)}) {self._closed('argument')}"

    def _typed(self, key: str, schema: str) -> str:
        value = self._value(f": %json {enforced(schema, bounds_integers=self._bounds_integers)}")
        return f"{self._headed(key, _types(json.loads(schema)))} {value}"

    def _headed(self, key: str, types: Sequence[str]) -> str:
        head: list[Piece] = [self._open, f'argument key={_quoted(key)} type="']
        if len(types) == 1:
            return pieces([*head, types[0] + '"', self._sep])
        kinds = " | ".join(map(literal, types))
        return f"{pieces(head)} ({kinds}) {self._head_end()}"

    def _head_end(self) -> str:
        return pieces(['"', self._sep])

    def _text(self, argument: TaggedArgument) -> str:
        least, most = argument.min_chars, argument.max_chars
        if not least and most is None:
            return "TEXT"
        return self._value(f": /(?s:.{{{least},{'' if most is None else most}}})/")

    def _value(self, rule: str) -> str:
        return self._values.setdefault(rule, f"value_{len(self._values)}")


def _types(schema: Any) -> Sequence[str]:
    """Returns the words that the template has for the types of a schema's values."""
    named = schema.get("type") if isinstance(schema, dict) else None
    found = [
        "number" if name == "integer" else name
        for name in ([named] if isinstance(named, str) else named or [])
    ]
    return [name for name in dict.fromkeys(found) if name in _TYPES] or _TYPES


def _quoted(text: str) -> str:
    """Returns an attribute's value as the template writes it."""
    return '"' + text.replace("&", "&amp;").replace('"', "&quot;") + '"'
