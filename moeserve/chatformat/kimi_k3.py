"""Kimi-K3's answers: sections between tags. The prompt has begun the first section.

    <|open|>think<|sep|>reasoning<|close|>think<|sep|>
    <|open|>response<|sep|>text<|close|>response<|sep|>
    <|open|>tools<|sep|>
    <|open|>call tool="name" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|close|>tools<|sep|>
    <|close|>message<|sep|><|end_of_msg|>

A real answer has no line ends between tags. The last four marks are control tokens, which the detokenizer must keep in
the text; the words between them are text. In the place of arguments a call may have one JSON object:
`<|open|>json type="object"<|sep|>{"city": "Paris"}<|close|>json<|sep|>`.

Models omit tags and the `<|sep|>` of a tag before another one. A tag that fits nowhere is text.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from .events import Event, Reasoning, Text
from .offered_names import offered_name
from .output import AnswerParser, joined
from .section_call import SectionCall
from .section_tags import CLOSE, END, MAX_TAG_CHARS, OPEN, SEP, WORDS, Tag, may_be_tag, tag_of
from .values import Schemas

_SEPARATOR: Final = "\n\n"  # between the texts of two sections
_OUTER: Final = ("tools", "message")  # closing tags that end a call too


class _Stage(Enum):
    BETWEEN = auto()  # sections
    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()  # between calls
    CALL = auto()


class KimiK3Parser(AnswerParser):
    """Parses an answer into events. A malformed call becomes plain text (see `tool_calls.ToolCallParser`)."""

    def __init__(
        self,
        prompt_end: str,
        reads_calls: bool,
        separates_reasoning: bool = True,
        schemas: Schemas | None = None,
    ) -> None:
        """prompt_end: the prompt from its last opening tag on, which the answer continues. reads_calls,
        separates_reasoning: False leaves calls or reasoning in the text. schemas: of the offered tools."""
        self._reads_calls = reads_calls
        self._separates_reasoning = separates_reasoning
        self._schemas: Schemas = {} if schemas is None else schemas
        self._stage = _Stage.BETWEEN
        self._call: SectionCall | None = None
        self._num_calls = 0
        self._held = ""  # the beginning of a possible control token
        self._tag = ""  # a tag that has begun
        self._space: list[str] = []  # white space between sections
        self._is_new = True  # no part of this section has been shown
        self._shown: set[type[Text | Reasoning]] = set()
        self.push(prompt_end)
        self._shown.clear()

    @property
    def is_thinking(self) -> bool:
        return self._stage is _Stage.THINK and self._separates_reasoning

    def push(self, text: str) -> list[Event]:
        """Takes more text. Returns its events, with neighbouring pieces of one kind joined."""
        events: list[Event] = []
        for char in text:
            self._push(char, events)
        return joined(events)

    def finish(self, ended_by: str | None = None) -> list[Event]:
        """Ends the text as `AnswerParser.finish` does. A section's tag that is not complete yields no event."""
        events: list[Event] = []
        tag, self._tag = self._tag, ""
        held, self._held = self._held, ""
        if self._call is None:
            self._text(tag if tag.startswith(f"{OPEN}call") else held, events)
        elif ended_by is None:
            self._break_off(tag + held, events)
        else:
            if not tag:
                self._text(held, events)
            elif (read := _read(tag)) is None or not self._take(read, tag, events):
                self._break_off(tag, events)
            if self._call is not None and not self._call.end(events):
                self._break_off("", events)
        return joined(events)

    # ---- control tokens

    def _push(self, char: str, events: list[Event]) -> None:
        if self._tag:
            self._read_tag(char, events)
            return
        held = self._held + char
        self._held = ""
        if held in (OPEN, CLOSE):
            self._tag = held
        elif held == END:
            self._take(Tag(False, "message"), held, events)
        elif held == SEP and self._stage is _Stage.BETWEEN:
            pass  # models repeat it
        elif held != SEP and any(word.startswith(held) for word in WORDS):
            self._held = held
        else:  # `<` occurs only as a token's first character
            self._held = "<" if char == "<" else ""
            self._text(held.removesuffix(self._held), events)

    def _read_tag(self, char: str, events: list[Event]) -> None:
        tag = self._tag + char
        end = next((word for word in WORDS if tag.endswith(word)), "")
        word = CLOSE if tag.startswith(CLOSE) else OPEN
        if end and (read := _read(tag.removesuffix(end))) is not None:
            raw = tag if end == SEP else tag.removesuffix(end)
            self._tag = ""
            if not self._take(read, raw, events):
                self._text(raw, events)
            for one in "" if end == SEP else end:
                self._push(one, events)
        elif not end and may_be_tag(word, tag[len(word) :]) and len(tag) <= MAX_TAG_CHARS:
            self._tag = tag
        else:
            self._tag = ""
            self._text(word, events)
            for one in tag[len(word) :]:
                self._push(one, events)

    # ---- sections

    def _take(self, tag: Tag, raw: str, events: list[Event]) -> bool:
        """Takes a tag. Returns False if it fits nowhere here, so that it is text."""
        if self._call is not None:
            return self._take_in_call(self._call, tag, raw, events)
        if self._stage is _Stage.THINK or self._stage is _Stage.RESPONSE:
            return self._take_in_text(tag, raw, events)
        if not tag.is_open:
            if tag.name in _OUTER:
                self._go(_Stage.BETWEEN)
            return True
        return self._open(tag, raw, events) or (tag.name == "message" and self._go(_Stage.BETWEEN))

    def _take_in_text(self, tag: Tag, raw: str, events: list[Event]) -> bool:
        thinks = self._stage is _Stage.THINK
        if tag.is_open:
            begins = tag.name == "response" and (thinks or self._is_new)
            begins |= tag.name == "think" and self._is_new
            is_call = tag.name == "tools" or (tag.name == "call" and self._tool(tag) in self._schemas)
            return (begins or is_call) and self._open(tag, raw, events)
        # Models that forget the end of their reasoning close the response that they have not opened.
        if tag.name in ("response", "message") or (tag.name == "think" and thinks):
            return self._go(_Stage.BETWEEN)
        return tag.name == "think" and self._is_new

    def _open(self, tag: Tag, raw: str, events: list[Event]) -> bool:
        """Takes an opening tag outside a call. Returns False if no section and no call begins with it."""
        match tag.name:
            case "think":
                return self._go(_Stage.THINK)
            case "response":
                return self._go(_Stage.RESPONSE)
            case "tools":
                return self._reads_calls and self._go(_Stage.TOOLS)
            case "call" if self._reads_calls and (tool := self._tool(tag)):
                self._call = SectionCall(self._num_calls, tool, self._schemas.get(tool, {}), raw, events)
                self._num_calls += 1
                return self._go(_Stage.CALL)
        return False

    def _tool(self, tag: Tag) -> str:
        return offered_name(tag.attribute("tool", "name"), self._schemas)

    def _go(self, stage: _Stage) -> bool:
        self._stage = stage
        self._space = []
        self._is_new = True
        return True

    def _show(self, text: str, events: list[Event]) -> None:
        kind = Reasoning if self.is_thinking else Text
        if self._is_new and kind in self._shown:
            events.append(kind(_SEPARATOR))
        self._is_new = False
        self._shown.add(kind)
        events.append(kind(text))

    def _text(self, text: str, events: list[Event]) -> None:
        for at, char in enumerate(text):
            if self._call is not None:
                if self._call.push(char, events):
                    continue
                if not self._call.is_complete:
                    self._break_off(text[at:], events)
                    return
                self._end_call(self._call, _Stage.BETWEEN, events)
            if self._stage in (_Stage.BETWEEN, _Stage.TOOLS):
                if char.isspace():
                    self._space.append(char)
                    continue
                char = "".join(self._space) + char
                self._go(_Stage.RESPONSE)
                self._is_new = False
            self._show(char, events)

    # ---- calls

    def _take_in_call(self, call: SectionCall, tag: Tag, raw: str, events: list[Event]) -> bool:
        match tag.name:
            case "argument" if tag.is_open:
                if call.in_text and not call.may_follow(tag.attribute("key", "name")):
                    return False
                return call.begin_value(tag, raw, events)
            case "json" if tag.is_open:
                return not call.in_text and call.begin_json(raw)
            case "argument" | "json" | "":
                return call.takes_closing(tag.name) and call.close_value(raw, events)
            case "call" | "tools" | "message" if not tag.is_open:
                return self._end_call(call, _Stage.TOOLS if tag.name == "call" else _Stage.BETWEEN, events)
        if call.in_text or not self._end_call(call, _Stage.TOOLS, events):
            return False
        return self._take(tag, raw, events)

    def _end_call(self, call: SectionCall, then: _Stage, events: list[Event]) -> bool:
        """Ends the call. Returns False if it cannot end here."""
        if not call.end(events):
            return False
        self._call = None
        return self._go(then)

    def _break_off(self, rest: str, events: list[Event]) -> None:
        assert self._call is not None
        self._call.break_off(rest, events)
        self._call = None
        self._go(_Stage.RESPONSE)
        self._is_new = False
        self._shown.add(Text)


def _read(tag: str) -> Tag | None:
    word = CLOSE if tag.startswith(CLOSE) else OPEN
    return tag_of(word, tag.removeprefix(word))
