"""Grammars of calls whose arguments stand in tags, as plain text: GLM's, MiniMax's, Qwen3-Coder's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from .json_schema.enforced import MAX_BOUNDED, enforced
from .lark_text import literal, pieces
from .spec import ArgumentTags, CallForm, GrammarTool, Piece, TaggedArgument

_ANY_KEY: Final = r"/[\w.:-]{1,64}/"


def tagged_tools(tools: Sequence[GrammarTool], form: CallForm, tags: ArgumentTags) -> str:
    """Returns the rules for one call, one a tool."""
    return _TaggedRules(tools, form, tags).rules()


class _TaggedRules:
    def __init__(self, tools: Sequence[GrammarTool], form: CallForm, tags: ArgumentTags) -> None:
        self._tools = tools
        schemas = {one.schema for tool in tools for one in tool.arguments or () if one.schema is not None}
        self._bounds_integers = len(schemas) <= MAX_BOUNDED
        self._form = form
        self._tags = tags
        self._values: dict[str, str] = {}  # names of the rules of values, by what they are

    def rules(self) -> str:
        lines = ["call: " + " | ".join(f"tool_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            head = self._text([*self._form.before_name, tool.name, *self._form.before_arguments])
            lines.append(f"tool_{i}: {head} {self._arguments(tool)} {self._text(self._form.behind)}")
        tags = self._tags
        key = f"{literal(tags.before_key)} ANY_KEY {self._text([tags.before_value])}"
        lines += [f"any_argument: {key} {self._any_text(0, None)}", f"ANY_KEY: {_ANY_KEY}"]
        lines += [f"{name}{rule}" for rule, name in self._values.items()]
        return "\n".join(lines) + "\n"

    def _arguments(self, tool: GrammarTool) -> str:
        if tool.arguments is None:
            return "any_argument*"
        return " ".join(f"({self._argument(one)}){'' if one.is_required else '?'}" for one in tool.arguments)

    def _argument(self, argument: TaggedArgument) -> str:
        tags = self._tags
        head = self._text([tags.before_key + argument.key + tags.before_value])
        if argument.schema is None and argument.words is None:
            return f"{head} {self._any_text(argument.min_chars, argument.max_chars)}"
        if argument.schema is not None:
            schema = enforced(argument.schema, bounds_integers=self._bounds_integers)
            value = self._rule(f": %json {schema}")
        else:
            value = self._rule(": " + " | ".join(map(literal, argument.words or [])))
        return f"{head} {value} {self._text([tags.before_close + tags.value_close + tags.behind])}"

    def _any_text(self, least: int, most: int | None) -> str:
        """Returns a text up to the first tag that closes it, and what stands behind the tag."""
        close = _escaped(self._tags.value_close)
        rule = f"/(?s:.*){close}/"
        if least or most is not None:  # what is counted is without the line end before the tag
            counted = f"(?s:.{{{least},{'' if most is None else most}}})"
            rule = f"/{counted}{_escaped(self._tags.before_close)}{close}/ & ~/(?s:.*){close}(?s:.+)/"
        return f"{self._rule(f'[lazy]: {rule}')} {self._text([self._tags.behind])}"

    def _rule(self, rule: str) -> str:
        return self._values.setdefault(rule, f"value_{len(self._values)}")

    def _text(self, parts: Sequence[Piece]) -> str:
        if not self._tags.optional_lines:
            return pieces(parts)
        return " ".join(
            "(" + literal(line) + ")?" if line == "\n" else pieces([line])
            for part in parts
            for line in (re.split("(\n)", part) if isinstance(part, str) else [part])
            if line != ""
        )


def _escaped(text: str) -> str:
    """Quotes a text for a regular expression of Lark's."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
