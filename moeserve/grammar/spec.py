"""GrammarSpec: the required form of an answer.

Sources: JSON Schema 2020-12 as far as llguidance implements it (it refuses what it does not); regular expressions
of Rust's `regex` crate, anchored at both ends; llguidance's dialect of Lark, or GBNF, its older form; for tools the
form that the model's chat format gives (`CallForm`).
"""

from __future__ import annotations

from typing import Final

import msgspec


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """A JSON text that validates against `schema`, which is JSON text as well: an object or a boolean."""

    schema: str


class Regex(msgspec.Struct, frozen=True, tag=True):
    pattern: str


class Ebnf(msgspec.Struct, frozen=True, tag=True):
    """Lark or GBNF, told apart by `::=`."""

    text: str


class Choice(msgspec.Struct, frozen=True, tag=True):
    options: list[str]


AnswerSpec = JsonSchema | Regex | Ebnf | Choice


class TaggedArgument(msgspec.Struct, frozen=True, array_like=True):
    """A tool's argument that the format writes between tags: a JSON value if `schema` is given, else one of `words`,
    else any text. Where tags say whether a value is JSON, a value of `other_schema` may come instead."""

    key: str
    is_required: bool
    schema: str | None = None  # JSON text
    words: list[str] | None = None
    min_chars: int = 0
    max_chars: int | None = None
    other_schema: str | None = None  # JSON text


class GrammarTool(msgspec.Struct, frozen=True, array_like=True):
    name: str
    schema: str  # JSON Schema of its arguments, as text
    arguments: list[TaggedArgument] | None = None  # between tags, in this order; None: any keys and texts


Piece = str | int  # text, or the id of a control token


class ArgumentTags(msgspec.Struct, frozen=True, array_like=True):
    """The text around an argument between tags. Order: `before_key`, the key, `before_value`, the value,
    `before_close`, `value_close`, `behind`. A text ends at the first `value_close`."""

    before_key: str
    before_value: str
    before_close: str
    value_close: str
    behind: str
    optional_lines: bool  # every line end around names, keys and values may be left out
    before_json: str = ""  # in place of `before_value` before a JSON value; "": the same


class CallForm(msgspec.Struct, frozen=True, array_like=True):
    """The text around calls. Order: `open`, `before_name`, the tool's name, `before_arguments`, the arguments,
    `behind`, `close`. is_block: one `open` and `close` enclose all calls; otherwise each call has its own."""

    open: Piece
    before_name: list[Piece]
    before_arguments: list[Piece]
    behind: list[Piece]
    close: list[Piece]
    separator: list[Piece]  # between one call and the next
    is_block: bool
    tags: ArgumentTags | None = None  # None: the arguments are JSON
    numbered: bool = False  # the name is followed by a colon and a number


HERMES: Final = CallForm(
    "<tool_call>", ['\n{"name": "'], ['", "arguments": '], ["}\n"], ["</tool_call>"], ["\n"], is_block=False
)  # Qwen3's


class ToolCalls(msgspec.Struct, frozen=True, tag=True):
    """A grammar that allows only calls of these tools: exactly one, or with `parallel` at least one."""

    tools: list[GrammarTool]
    parallel: bool
    form: CallForm = HERMES


class TextWithToolCalls(msgspec.Struct, frozen=True, tag=True):
    """Free text in which every call is a valid call of one of these tools."""

    tools: list[GrammarTool]
    parallel: bool
    form: CallForm = HERMES


class JsonOrToolCalls(msgspec.Struct, frozen=True, tag=True):
    """A JSON text that validates, or calls of these tools."""

    schema: str
    tools: list[GrammarTool]
    parallel: bool
    form: CallForm = HERMES


class Channels(msgspec.Struct, frozen=True, tag=True):
    """An answer of gpt-oss: reasoning and commentary, then a call of one of these tools or the final text, whose form
    is `answer`."""

    tokens: dict[str, int]  # the format's control tokens, by text
    answer: AnswerSpec | None = None  # None: any text
    tools: list[GrammarTool] = []
    must_call: bool = False
    max_reasoning: int | None = None  # most tokens of reasoning, 0: none


class Messages(msgspec.Struct, frozen=True, tag=True):
    """An answer of Solar Open: reasoning and text, then calls of these tools or the last text, whose form is
    `answer`."""

    tokens: dict[str, int]  # the format's control tokens, by text
    begun: str = ""  # "think": the prompt has begun the reasoning; "": a message, whose kind is open
    answer: AnswerSpec | None = None  # None: any text
    tools: list[GrammarTool] = []
    must_call: bool = False
    parallel: bool = True
    max_reasoning: int | None = None  # most tokens of reasoning, 0: none


class Sections(msgspec.Struct, frozen=True, tag=True):
    """An answer of Kimi-K3: reasoning, a response whose form is `answer`, and calls of these tools. A tool without
    `arguments` has them in one JSON object, unless its schema allows any object."""

    tokens: dict[str, int]  # the format's control tokens, by text
    begun: str = ""  # the section that the prompt has begun, "think" or "response"; "": none
    answer: AnswerSpec | None = None  # None: any text
    tools: list[GrammarTool] = []
    must_call: bool = False
    parallel: bool = True
    max_reasoning: int | None = None  # most tokens of reasoning, 0: none


WithCalls = ToolCalls | TextWithToolCalls | JsonOrToolCalls
WholeAnswer = Channels | Messages | Sections
GrammarSpec = AnswerSpec | WithCalls | WholeAnswer
ANY_OBJECT: Final = JsonSchema('{"type": "object"}')
