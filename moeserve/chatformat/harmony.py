"""gpt-oss's answers (OpenAI's harmony format): messages in channels. The prompt has begun the first message.

    <|start|>assistant
    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary<|message|>text before a call<|end|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"key": "value"}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

A real answer has no line ends between messages. A call's recipient may also come before its channel. The tags are
control tokens, which the detokenizer must keep in the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from .call_json import CallJson
from .events import CallArguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from .json_reader import Status
from .offered_names import offered_name
from .output import AnswerParser, joined

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
WORDS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ANALYSIS: Final = "analysis"
_FINAL: Final = "final"
# Ends a message and begins the answer's.
ANSWER_FOLLOWS: Final = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
TOOLS: Final = "functions."  # prefix of a tool's name in a call's recipient

MAX_HEADER_CHARS: Final = 1024
# A header, or its beginning, behind `<|start|>` or `<|channel|>`: role or channel, recipient, kind of text.
HEADER_PART: Final = (
    r"\s?\w{0,16}(?:\s?to=\s?[^\s<]{0,128}|\s(?:to?)?)?"
    rf"(?:\s?{re.escape(CONSTRAIN)}\w{{0,16}}|\s(?:j|js|jso|json|c|co|cod|code)?)?\s?"
)
_ENDS: Final = (END, CALL, RETURN)
# The tags that end a message; the last two also begin the next one's header.
_BREAKS: Final = (*_ENDS, START, CHANNEL)
_ROLE: Final = "assistant"
# The part of a header before its first tag.
_CHANNELS: Final = (ANALYSIS, "commentary", _FINAL)
_ROLE_PART: Final = re.compile(
    rf"(?:assistant)?\s*(?:{'|'.join(_CHANNELS)})?\s*(?:t|to|to=\s?\S*\s*|to=\s?\S+\s+\w{{0,8}})?"
)
_RECIPIENT: Final = re.compile(r"\bto=\s?(?!(?:assistant|user|all)\b(?![./:]))([^\s<]+)")
# A tool in the place of a message's role or channel.
_MISPLACED: Final = re.compile(rf"(?:{re.escape(START)}|{re.escape(CHANNEL)})\s*{re.escape(TOOLS)}([^\s<]+)")
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*([a-zA-Z]+)")
# The header proper of a header that lacks its last tag: text may follow it. A longer recipient is such text.
_TO: Final = r"\s*(?:\bto=\s?[^\s<]{1,128}(?![^\s<]))?"
_PROPER: Final = re.compile(
    rf"\s*(?:{re.escape(START)})?\s*(?:{_ROLE})?{_TO}\s*(?:{re.escape(CHANNEL)})?\s*"
    rf"(?:(?:{'|'.join(_CHANNELS)})\b)?{_TO}{_TO}\s*"
)
# Tags, each with the word that belongs to it.
_TAGGED: Final = re.compile(
    rf"{re.escape(CONSTRAIN)}\w*|{re.escape(START)}(?:\s*{_ROLE})?|"
    rf"{re.escape(CHANNEL)}\s*(?:(?:{'|'.join(_CHANNELS)})\b)?|{'|'.join(map(re.escape, (MESSAGE, *_ENDS)))}"
)
_BEGUN_RECIPIENT: Final = ("t", "to", "to=")
_BARE_CHANNEL: Final = re.compile(rf"\s*(?:{_ROLE})?\s*({'|'.join(_CHANNELS)})\b")
_SEPARATOR: Final = "\n\n"  # between the texts of two messages


class _Stage(Enum):
    HEADER = auto()
    CALL_START = auto()  # after a call's header: reads white space, then `{`
    CALL = auto()
    CONTENT = auto()


class HarmonyParser(AnswerParser):
    """Parses an answer into events. Text that does not have the format, and malformed calls, become plain text (see
    `tool_calls.ToolCallParser`)."""

    def __init__(
        self,
        prompt_end: str,
        reads_calls: bool,
        separates_reasoning: bool = True,
        offered: Collection[str] = (),
    ) -> None:
        """prompt_end: the prompt from its last `<|start|>` on, which the answer continues. reads_calls,
        separates_reasoning: False leaves calls or reasoning in the text. offered: the tools' names."""
        self._reads_calls = reads_calls
        self._offered = offered
        self._separates_reasoning = separates_reasoning
        self._stage = _Stage.HEADER
        self._header = ""
        self._held = ""  # the beginning of a possible tag
        self._is_reasoning = False
        self._tool = ""
        self._call_text: list[str] = []  # text after the call's header
        self._json = CallJson(_BREAKS)
        self._num_calls = 0
        self._after_call = False  # a call has just ended: white space after it belongs to the format
        self._is_new = True  # no part of this message has been shown
        self._shown: set[type[Text | Reasoning]] = set()
        self.push(prompt_end)
        self._shown.clear()

    @property
    def is_thinking(self) -> bool:
        return self._stage is _Stage.CONTENT and self._is_reasoning

    def push(self, text: str) -> list[Event]:
        """Takes more text. Returns its events, with neighbouring pieces of one kind joined."""
        events: list[Event] = []
        for char in text:
            self._push(char, events)
        return joined(events)

    def finish(self, ended_by: str | None = None) -> list[Event]:
        """Ends the text as `AnswerParser.finish` does. A header without a message yields no event, unless it is the
        header of a call."""
        events: list[Event] = []
        if self._stage is _Stage.CALL:
            if ended_by is not None and self._json.end():
                events += [CallArguments(self._num_calls, self._json.shown), CallEnd(self._num_calls)]
            else:
                self._break_off(events)
        elif self._stage is _Stage.CALL_START and ended_by is not None and self._tool in self._offered:
            # Models write nothing for a call without arguments.
            events += [
                CallStart(self._num_calls, self._tool),
                CallArguments(self._num_calls, "{}"),
                CallEnd(self._num_calls),
            ]
        elif self._stage is _Stage.CONTENT:
            self._show(self._held, events)
        elif ended_by is None and (self._begins_recipient() or self._is_call_header()):
            pass
        elif (
            self._stage is _Stage.CALL_START
            or not any(word in self._header for word in WORDS)
            or _RECIPIENT.search(self._proper(self._header))
        ):
            self._begin_content(is_reasoning=False)
            self._show(self._header + "".join(self._call_text), events)
        else:
            self._show_header_text(self._header.rstrip(), events)
        return joined(events)

    def _push(self, char: str, events: list[Event]) -> None:
        match self._stage:
            case _Stage.HEADER:
                self._read_header(char, events)
            case _Stage.CALL_START:
                self._read_call_start(char, events)
            case _Stage.CALL:
                self._read_call(char, events)
            case _Stage.CONTENT:
                self._read_content(char, events)

    # ---- the parts of a message

    def _read_header(self, char: str, events: list[Event]) -> None:
        if char == "{" and self._reads_calls and self._recipient(self._header) is not None:
            self._begin_message()  # the header of a call lacks its last tag
            self._push(char, events)
            return
        self._header += char
        if self._header.endswith(MESSAGE):
            self._begin_message()
        elif self._header.endswith(_ENDS):
            header, self._header = self._header, ""
            self._show_header_text(header[: header.rindex("<")].rstrip(), events)
            self._stage = _Stage.HEADER
        elif self._header == START + _ROLE:
            self._header = ""
        elif len(self._header) > MAX_HEADER_CHARS or not _may_be_header(self._header):
            header, self._header = self._header, ""
            if any(word in header for word in WORDS):
                last = header[header.rindex("<") :]
                if not any(tag.startswith(last) for tag in _BREAKS):
                    last = ""
                self._show_header_text(header.removesuffix(last), events)
                for one in last:  # a tag, or its beginning
                    self._push(one, events)
                return
            self._begin_content(is_reasoning=False)
            self._held = "<" if char == "<" else ""
            self._show(header.removesuffix(self._held), events)

    def _show_header_text(self, header: str, events: list[Event]) -> None:
        """Begins the message of a header that lacks its last tag, with the text that models write in it then."""
        self._begin_content(is_reasoning=self._is_analysis(header))
        self._show(self._free_text(header), events)

    def _begins_recipient(self) -> bool:
        """True if the header breaks off within `to=`. An answer of no other text may mean the word."""
        has_format = any(word in self._header for word in WORDS) or self._shown or self._num_calls
        return bool(has_format) and self._free_text(self._header).rstrip() in _BEGUN_RECIPIENT

    def _is_call_header(self) -> bool:
        """True if the text is a call's header, or its beginning with a tag and a tool, and nothing else."""
        if self._stage is not _Stage.HEADER or not any(word in self._header for word in WORDS):
            return False
        return self._recipient(self._header) is not None and not self._free_text(self._header)

    def _recipient(self, header: str) -> str | None:
        """Returns the tool to which a message is addressed; None if it is addressed to none. In the final channel
        `to=5` is text, unless there is such a tool."""
        found = _RECIPIENT.search(header)
        if found is None:
            return None
        is_tool = found[1].startswith(TOOLS) or found[1] in self._offered
        return None if not is_tool and _channel(header) == _FINAL else found[1]

    def _is_analysis(self, header: str) -> bool:
        return self._separates_reasoning and _CHANNEL.findall(header)[-1:] == [ANALYSIS]

    def _begin_message(self) -> None:
        recipient = self._recipient(self._header)
        self._begin_content(is_reasoning=_channel(self._header) == ANALYSIS and self._separates_reasoning)
        if recipient is None and " to=" not in self._header:  # `to=assistant`: a tool's result
            misplaced = _MISPLACED.search(self._header)
            recipient = None if misplaced is None else misplaced[1]
        if recipient is not None and self._reads_calls:
            self._tool = offered_name(recipient.removeprefix(TOOLS), self._offered)
            self._stage = _Stage.CALL_START

    def _proper(self, header: str) -> str:
        """Returns the beginning of a header up to the text that may stand in it: role, recipient and channel."""
        found = _PROPER.match(header)
        proper = found[0] if found is not None else ""
        recipient = _RECIPIENT.search(proper)
        is_text = recipient is not None and self._recipient(header) is None
        return proper[: recipient.start()] if recipient is not None and is_text else proper

    def _free_text(self, header: str) -> str:
        """Returns the text of a header behind its role, recipient and channel, without tags and the kind of text."""
        proper = self._proper(header)
        text = _TAGGED.sub(" ", header[len(proper) :]).lstrip()
        has_channel = any(channel in proper for channel in _CHANNELS)
        is_begun = not has_channel and any(word.startswith(text) for word in (_ROLE, *_CHANNELS))
        return "" if is_begun else text

    def _begin_content(self, is_reasoning: bool) -> None:
        self._stage = _Stage.CONTENT
        self._is_reasoning = is_reasoning
        self._is_new = True
        self._after_call = False

    def _read_call_start(self, char: str, events: list[Event]) -> None:
        if char == "{" and self._tool:
            self._stage = _Stage.CALL
            self._json = CallJson(_BREAKS)
            events.append(CallStart(self._num_calls, self._tool))
            self._read_call(char, events)
        elif char.isspace():
            self._call_text.append(char)
        else:  # a tool whose arguments are not JSON; no request offers such a tool
            text = [*self._call_text, char]
            self._call_text = []
            self._stage = _Stage.CONTENT
            for one in text:
                self._read_content(one, events)

    def _read_call(self, char: str, events: list[Event]) -> None:
        status = self._json.push(char)
        if self._json.shown:
            events.append(CallArguments(self._num_calls, self._json.shown))
        self._call_text.append(char)
        if status is Status.GOING:
            return
        unread = self._json.unread
        if status is Status.DONE:
            events.append(CallEnd(self._num_calls))
            self._end_call()
            self._after_call = True
        else:
            self._break_off(events, unread)
        for one in unread:
            self._push(one, events)

    def _break_off(self, events: list[Event], unread: str = "") -> None:
        raw = (self._header + "".join(self._call_text)).removesuffix(unread)
        rest = raw[len(raw) - self._json.num_held :]
        events.append(CallBroken(self._num_calls, raw, rest))
        self._end_call()

    def _end_call(self) -> None:
        self._num_calls += 1
        self._call_text = []
        self._begin_content(is_reasoning=False)

    def _read_content(self, char: str, events: list[Event]) -> None:
        held = self._held + char
        if held in _BREAKS:
            self._held = ""
            self._header = "" if held in _ENDS else held
            self._stage = _Stage.HEADER
        elif any(tag.startswith(held) for tag in _BREAKS):
            self._held = held
        elif self._after_call and held.isspace():
            pass
        else:  # `<` occurs only as a tag's first character
            self._held = "<" if char == "<" else ""
            self._show(held.removesuffix(self._held), events)

    def _show(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        kind = Reasoning if self._is_reasoning else Text
        if self._is_new and kind in self._shown:
            events.append(kind(_SEPARATOR))
        self._is_new = self._after_call = False
        self._shown.add(kind)
        events.append(kind(text))


def _channel(header: str) -> str:
    """Returns a header's channel; "" if it names none."""
    if channels := _CHANNEL.findall(header):
        return str(channels[-1])
    bare = _BARE_CHANNEL.match(header)  # models omit the tag
    return "" if bare is None else bare[1]


def _may_be_header(text: str) -> bool:
    role, tag, rest = text.lstrip().partition("<")
    if not tag and any(word.startswith(role) for word in (_ROLE, *_CHANNELS)):
        return True
    known = not tag or any(word.startswith(tag + rest) or (tag + rest).startswith(word) for word in WORDS)
    return known and _ROLE_PART.fullmatch(role) is not None
