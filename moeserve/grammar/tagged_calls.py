"""Grammars of calls whose arguments are plain text between tags: GLM's, MiniMax's, Qwen3-Coder's.

A text ends only at a closing tag that is followed by the next argument's tag or by the call's closing tag, as in
chatformat.value_end. So the rule for a text includes the tag after it, and the next rule begins after that tag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from .json_schema.enforced import MAX_BOUNDED, enforced
from .lark_text import literal, pieces
from .spec import ArgumentTags, CallForm, GrammarTool, Piece, TaggedArgument

_ANY_KEY: Final = r"/[\w.:-]{1,64}/"
_ANY_TEXT: Final = TaggedArgument("", is_required=False)


def with_whole_calls(form: CallForm) -> CallForm:
    """Returns the form with `close` moved into `behind` if each call has its own closing tag, else the form
    unchanged."""
    if form.tags is None or form.is_block:
        return form
    return replace(form, behind=[*form.behind, *form.close], close=[])


def tagged_tools(tools: Sequence[GrammarTool], form: CallForm, tags: ArgumentTags) -> str:
    """Returns the rules for one call, one rule per tool. form: the result of `with_whole_calls`."""
    return _TaggedRules(tools, form, tags).rules()


class _TaggedRules:
    def __init__(self, tools: Sequence[GrammarTool], form: CallForm, tags: ArgumentTags) -> None:
        self._tools = tools
        arguments = [way for tool in tools for one in tool.arguments or () for way in _ways(one)]
        schemas = {one.schema for one in arguments if one.schema is not None}
        self._bounds_integers = len(schemas) <= MAX_BOUNDED
        self._form = form
        self._tags = tags
        self._values: dict[str, str] = {}  # text of a value's rule → its name
        # The call's closing tag; None if it is a control token, which a text rule cannot contain.
        first = form.behind[0]
        self._close = first[: first.index(">") + 1] if isinstance(first, str) else None
        self._behind_close = (
            form.behind if self._close is None else [str(first).removeprefix(self._close), *form.behind[1:]]
        )

    def rules(self) -> str:
        lines = ["call: " + " | ".join(f"tool_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            head = self._text([*self._form.before_name, tool.name, *self._form.before_arguments])
            arguments = tool.arguments
            first = "any_rest" if arguments is None else f"rest_{i}_0"
            lines.append(f"tool_{i}: {head} {first}")
            lines += self._arguments(f"{i}_", arguments or [])
        before_value = self._text([self._tags.before_value])
        if self._tags.before_json:
            before_value = f"({before_value} | {self._text([self._tags.before_json])})"
        key = f"ANY_KEY {before_value}"
        lines += [f"any_rest: {literal(self._tags.before_key)} any_keyed | {self._end()}"]
        lines += [f"any_keyed: {key} {self._value(_ANY_TEXT, 'any_', True, True)}", f"ANY_KEY: {_ANY_KEY}"]
        lines.append(f"ended: {self._text(self._behind_close) or literal('')}")
        lines += [f"{name}{rule}" for rule, name in self._values.items()]
        return "\n".join(lines) + "\n"

    def _end(self) -> str:
        return "ended" if self._close is None else f"{literal(self._close)} ended"

    def _arguments(self, tool: str, arguments: Sequence[TaggedArgument]) -> list[str]:
        """Returns two rules per argument: `rest_`, for the rest of the call from this argument on, and `keyed_`, the
        same after the tag before the key."""
        count = len(arguments)
        required = [argument.is_required for argument in arguments]
        lines = []
        for at in range(count + 1):
            can_end = not any(required[at:])
            options = [f"{literal(self._tags.before_key)} keyed_{tool}{at}"] * (at < count) + [
                self._end()
            ] * can_end
            lines.append(f"rest_{tool}{at}: " + " | ".join(options))
        for at, argument in enumerate(arguments):
            then = f"{tool}{at + 1}"
            ways = [
                f"{self._head(one)} {self._value(one, then, at + 1 < count, not any(required[at + 1 :]))}"
                for one in _ways(argument)
            ]
            if not argument.is_required and at + 1 < count:
                ways.append(f"keyed_{then}")  # without this argument
            lines.append(f"keyed_{tool}{at}: " + " | ".join(ways))
        return lines

    def _head(self, argument: TaggedArgument) -> str:
        """Returns the expression for an argument's key and the tag after it."""
        before_json = self._tags.before_json if argument.schema is not None else ""
        return self._text([argument.key + (before_json or self._tags.before_value)])

    def _value(self, argument: TaggedArgument, then: str, can_go_on: bool, can_end: bool) -> str:
        """Returns the expression for a value, its closing tag and the rest of the call. then: prefix of the names of
        the rest's rules."""
        tags = self._tags
        keyed = "any_keyed" if then == "any_" else f"keyed_{then}"
        rest = "any_rest" if then == "any_" else f"rest_{then}"
        if argument.schema is None and argument.words is None:
            if self._close is None:
                return f"{self._lazy(argument, '')} {self._text([tags.behind])} {rest}"
            ways = [f"{self._lazy(argument, tags.before_key)} {keyed}"] * can_go_on
            ways += [f"{self._lazy(argument, self._close)} ended"] * can_end
            return f"({' | '.join(ways)})"
        if argument.schema is not None:
            schema = enforced(argument.schema, bounds_integers=self._bounds_integers)
            value = self._rule(f": %json {schema}")
        else:
            value = self._rule(": " + " | ".join(map(literal, argument.words or [])))
        return f"{value} {self._text([tags.before_close + tags.value_close + tags.behind])} {rest}"

    def _lazy(self, argument: TaggedArgument, then: str) -> str:
        """Returns the rule of a text up to its closing tag, followed by `then`. The text itself contains no closing tag
        that is followed by a key's tag or the call's closing tag, even one that is not allowed there."""
        close = _escaped(self._tags.value_close)
        lines = _escaped(self._tags.behind) if then else ""
        ending = close + (f"({lines})?" if self._tags.optional_lines and lines else lines) + _escaped(then)
        least, most = argument.min_chars, argument.max_chars
        text = "(?s:.*)"
        if least or most is not None:  # the line end before the tag does not count
            text = f"(?s:.{{{least},{'' if most is None else most}}}){_escaped(self._tags.before_close)}"
        nexts = "|".join(_escaped(tag) for tag in (self._tags.before_key, self._close) if tag)
        early = f"(?s:.*){close}" + (rf"\s*({nexts})" if then else "") + "(?s:.+)"
        return self._rule(f"[lazy]: /{text}{ending}/ & ~/{early}/")

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


def _ways(argument: TaggedArgument) -> list[TaggedArgument]:
    """Returns the argument once for each form that its value may have."""
    if argument.other_schema is None:
        return [argument]
    text = replace(argument, other_schema=None)
    return [text, replace(text, schema=argument.other_schema, words=None)]


def _escaped(text: str) -> str:
    """Quotes a text for a regular expression of Lark's."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
