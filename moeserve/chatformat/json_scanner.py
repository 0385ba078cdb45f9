"""A JSON object followed character by character (RFC 8259): whether the text so far can still become one."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any, Final

_SPACE: Final = frozenset(" \t\r\n")
_DIGITS: Final = frozenset("0123456789")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}

# A number's states: what may follow, and which state that leads to. Those in _COMPLETE may end the number.
_NUMBER: Final = {
    "-": {"0": "zero", "1-9": "int"},
    "zero": {".": ".", "e": "e"},
    "int": {"0": "int", "1-9": "int", ".": ".", "e": "e"},
    ".": {"0": "frac", "1-9": "frac"},
    "frac": {"0": "frac", "1-9": "frac", "e": "e"},
    "e": {"sign": "sign", "0": "exp", "1-9": "exp"},
    "sign": {"0": "exp", "1-9": "exp"},
    "exp": {"0": "exp", "1-9": "exp"},
}
_COMPLETE: Final = frozenset(("zero", "int", "frac", "exp"))


class Status(Enum):
    GOING = auto()
    DONE = auto()  # this character was the object's last
    BROKEN = auto()  # this character cannot come here


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # at the start of an array
    KEY = auto()
    KEY_OR_END = auto()  # at the start of an object
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


class JsonScanner:
    """Push character after character of one object; nothing after DONE or BROKEN."""

    def __init__(self) -> None:
        self._open: list[str] = []  # "{" and "[" not closed yet
        self._expect = _Expect.VALUE
        self._in_key = False
        self._left = ""  # of a literal
        self._hex_left = 0
        self._number = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, char: str) -> Status:
        expect = self._expect
        if expect is _Expect.STRING:
            return self._string(char)
        if expect is _Expect.ESCAPE:
            return self._escape(char)
        if expect is _Expect.HEX:
            self._hex_left -= 1
            if self._hex_left == 0:
                self._expect = _Expect.STRING
            return Status.GOING if char in _HEX else Status.BROKEN
        if expect is _Expect.LITERAL:
            fits, self._left = self._left[0] == char, self._left[1:]
            if not self._left:
                self._expect = _Expect.COMMA_OR_END
            return Status.GOING if fits else Status.BROKEN
        if expect is _Expect.NUMBER:
            following = _NUMBER[self._number].get(_number_class(char))
            if following is not None:
                self._number = following
                return Status.GOING
            if self._number not in _COMPLETE:
                return Status.BROKEN
            self._expect = _Expect.COMMA_OR_END
        return Status.GOING if char in _SPACE else self._structure(char)

    def _string(self, char: str) -> Status:
        if char == '"':
            self._expect = _Expect.COLON if self._in_key else _Expect.COMMA_OR_END
            self._in_key = False
        elif char == "\\":
            self._expect = _Expect.ESCAPE
        elif char < " ":
            return Status.BROKEN
        return Status.GOING

    def _escape(self, char: str) -> Status:
        self._expect = _Expect.STRING
        if char == "u":
            self._expect, self._hex_left = _Expect.HEX, 4
            return Status.GOING
        return Status.GOING if char in _ESCAPES else Status.BROKEN

    def _structure(self, char: str) -> Status:
        match self._expect:
            case _Expect.KEY | _Expect.KEY_OR_END if char == '"':
                self._expect, self._in_key = _Expect.STRING, True
            case _Expect.KEY_OR_END if char == "}":
                return self._close()
            case _Expect.VALUE_OR_END if char == "]":
                return self._close()
            case _Expect.COLON if char == ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_END if char == ",":
                self._expect = _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE
            case _Expect.COMMA_OR_END if char == ("}" if self._open[-1] == "{" else "]"):
                return self._close()
            case _Expect.VALUE | _Expect.VALUE_OR_END:
                return self._value(char)
            case _:
                return Status.BROKEN
        return Status.GOING

    def _value(self, char: str) -> Status:
        if char == "{":
            self._open.append(char)
            self._expect = _Expect.KEY_OR_END
        elif not self._open:
            return Status.BROKEN
        elif char == "[":
            self._open.append(char)
            self._expect = _Expect.VALUE_OR_END
        elif char == '"':
            self._expect = _Expect.STRING
        elif char in _LITERALS:
            self._expect, self._left = _Expect.LITERAL, _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self._expect = _Expect.NUMBER
            self._number = "-" if char == "-" else "zero" if char == "0" else "int"
        else:
            return Status.BROKEN
        return Status.GOING

    def _close(self) -> Status:
        self._open.pop()
        self._expect = _Expect.COMMA_OR_END
        return Status.GOING if self._open else Status.DONE


def to_json(value: Any) -> str:
    """Compact enough, and valid Unicode: `json.loads` may have made lone surrogates. ValueError for a number that
    JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def is_unicode(text: str) -> bool:
    """False when it holds a lone surrogate, which no UTF-8 can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number_class(char: str) -> str:
    if char == "0":
        return "0"
    if char in _DIGITS:
        return "1-9"
    return {"e": "e", "E": "e", "+": "sign", "-": "sign", ".": "."}.get(char, "")
