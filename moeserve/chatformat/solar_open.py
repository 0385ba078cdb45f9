"""Solar Open's answers: messages between control tokens. The prompt has begun the first message.

    <|think|>reasoning<|end|>
    <|begin|>assistant<|content|>text before a call<|end|>
    <|begin|>assistant<|tool_calls|>
    <|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>name<|tool_call:args|>{"key": "value"}<|tool_call:end|><|calls|>
    <|begin|>assistant<|content|>text<|flush|>

A real answer has no line ends between tokens. The ten characters before a call's name are its id, which the model makes
up. The detokenizer must keep the control tokens in the text.
"""

from __future__ import annotations

from typing import Final

from .events import Event, Reasoning, Text
from .harmony import MAX_HEADER_CHARS
from .output import OutputParser
from .separated import SeparatedBody, SeparatedSyntax
from .tool_calls import CallTags, ToolCallParser
from .values import Schemas

BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
THINK: Final = "<|think|>"
CONTENT: Final = "<|content|>"
TOOL_CALLS: Final = "<|tool_calls|>"
CALL_OPEN: Final = "<|tool_call:begin|>"
CALL_NAME: Final = "<|tool_call:name|>"
CALL_ARGS: Final = "<|tool_call:args|>"
CALL_CLOSE: Final = "<|tool_call:end|>"
CALLS: Final = "<|calls|>"
FLUSH: Final = "<|flush|>"
WORDS: Final = (
    *(BEGIN, END, THINK, CONTENT, TOOL_CALLS),
    *(CALL_OPEN, CALL_NAME, CALL_ARGS, CALL_CLOSE, CALLS, FLUSH),
)
ROLE: Final = "assistant"
# Ends the reasoning and begins the answer's text.
ANSWER_FOLLOWS: Final = f"{END}{BEGIN}{ROLE}{CONTENT}"

_TAGS: Final = CallTags(TOOL_CALLS, CALLS, bare=CALL_OPEN, following=CALL_OPEN, ends=(CALL_CLOSE,))
_MARKS: Final = (BEGIN, END, THINK, CONTENT, TOOL_CALLS, CALL_OPEN)  # they begin or end messages
_SEPARATOR: Final = "\n\n"  # between the texts of two messages


def call_id(name: str, number: int) -> str:
    """Returns a call's id in the history: ten lower-case letters or digits, as the template tells the model."""
    return f"call{number:06d}"


def _name_of(text: str) -> str:
    """Returns the tool's name; "" if there is none. Models omit the id with its tag."""
    name = text.rpartition(CALL_NAME)[2].strip()
    return "" if any(char.isspace() for char in name) else name


_SYNTAX: Final = SeparatedSyntax(
    CALL_OPEN, CALL_ARGS, CALL_CLOSE, (CALLS, END), name_of=_name_of, needs_separator=False
)


class SolarMessages:
    """Splits an answer into reasoning and text. Calls stay in the text, with their tags."""

    def __init__(self, prompt_end: str, separates_reasoning: bool = True) -> None:
        """prompt_end: the prompt from its last `<|begin|>` on, which the answer continues. separates_reasoning: False
        makes reasoning text."""
        self._separates_reasoning = separates_reasoning
        self._is_reasoning = False
        self._in_message = False
        self._expects_role = False  # `<|begin|>` has come
        self._header = ""  # the text between messages
        self._held = ""  # the beginning of a possible control token
        self._is_new = True  # no part of this message has been shown
        self._shown: set[type[Text | Reasoning]] = set()
        self.push(prompt_end)
        self._expects_role = False
        self._header = ""
        self._shown.clear()

    @property
    def is_thinking(self) -> bool:
        return self._in_message and self._is_reasoning

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for char in text:
            held = self._held + char
            self._held = ""
            if held in _MARKS:
                self._mark(held, events)
            elif any(mark.startswith(held) for mark in _MARKS):
                self._held = held
            else:  # `<` occurs only as a token's first character
                self._held = "<" if char == "<" else ""
                self._text(held.removesuffix(self._held), events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        held, self._held = self._held, ""
        if self._expects_role:
            return events
        if held:
            self._text(held, events)
        elif not self._in_message and not self._shown and self._header:
            self._show(self._header, events)  # the answer is white space
        return events

    def _mark(self, mark: str, events: list[Event]) -> None:
        match mark:
            case "<|begin|>" | "<|end|>":
                self._in_message = False
                self._expects_role = mark == BEGIN
                self._header = ""
            case "<|think|>" | "<|content|>":
                self._begin(is_reasoning=mark == THINK)
            case _:
                if not self._in_message:
                    self._begin(is_reasoning=False)
                    self._is_new = False  # a call is no text, before which a separator would stand
                self._show(mark, events)

    def _begin(self, is_reasoning: bool) -> None:
        self._in_message = self._is_new = True
        self._is_reasoning = is_reasoning and self._separates_reasoning
        self._expects_role = False
        self._header = ""

    def _text(self, text: str, events: list[Event]) -> None:
        if not self._in_message:
            text = self._header + text
            self._header = text
            is_short = (
                len(text) <= MAX_HEADER_CHARS
            )  # a longer one would be looked at whole for each character
            if is_short and (not text.strip() or (self._expects_role and ROLE.startswith(text.strip()))):
                return
            if self._expects_role and text.lstrip().startswith(ROLE):
                text = text.lstrip().removeprefix(ROLE)  # models omit the token behind the role
            self._begin(is_reasoning=False)
        self._show(text, events)

    def _show(self, text: str, events: list[Event]) -> None:
        kind = Reasoning if self._is_reasoning else Text
        if self._is_new and kind in self._shown:
            events.append(kind(_SEPARATOR))
        self._is_new = False
        self._shown.add(kind)
        events.append(kind(text))


def parser(
    prompt_end: str, reads_calls: bool, separates_reasoning: bool = True, offered: Schemas | None = None
) -> OutputParser:
    """Returns a parser of whole answers. offered: the schemas of the offered tools, by name; the other arguments are
    `SolarMessages`'."""
    names = tuple(offered or ())
    calls = ToolCallParser(lambda index: SeparatedBody(index, _SYNTAX), _TAGS, names) if reads_calls else None
    return OutputParser(SolarMessages(prompt_end, separates_reasoning), calls, names)
