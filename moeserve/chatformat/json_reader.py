"""Reads a JSON object as models write it, character by character, and writes it as valid JSON (RFC 8259).

Valid JSON is unchanged. Accepted too, if unambiguous: raw line ends and tabs in strings, unknown escapes, unescaped
quotes in strings if no JSON syntax follows them, a comma before a closing bracket, keys without quotes, numbers such as
`+5` and `.5`, and Python's single and triple quotes, tuples, True, False and None. A Dialect accepts more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from .json_text import escaped
from .json_words import json_of_word

_SPACE: Final = frozenset(" \t\r\n")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_KEY: Final = re.compile(r"[\w-]+")
_NAME: Final = re.compile(r"[^\W\d][\w-]*")  # a key that is no number
_MAX_KEY: Final = 64  # characters of a key that lacks the comma before it
_MAX_WORD: Final = 4096  # characters of a number
_MAX_DEPTH: Final = 256  # of brackets: clients cannot parse deeper nesting
_CALL: Final = "("  # opens the arguments of a Python call, which become an object
_TUPLE: Final = "(,"  # stands for the parenthesis that opens a tuple, which becomes an array
_CLOSING: Final = {"{": "}", "[": "]", _CALL: ")", _TUPLE: ")"}
_JSON_OPENING: Final = {_CALL: "{", _TUPLE: "["}
_JSON_CLOSING: Final = {_CALL: "}", _TUPLE: "]"}


class Status(Enum):
    GOING = auto()
    DONE = auto()  # this character was the object's last one
    BROKEN = auto()  # this character is not allowed here


@dataclass(frozen=True, slots=True)
class Dialect:
    quotes: tuple[str, ...] = ('"', "'")
    raw_quote: str = ""  # one of `quotes`: a tag that begins and ends strings without escapes
    colons: str = ":"
    is_bare: bool = False  # keys and one-word strings may lack quotes


JSON: Final = Dialect()


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # in an array
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    QUOTE = auto()  # the first characters of a quote have come
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    STRING_END = auto()  # after a quote, which ends the string if JSON syntax follows
    WORD = auto()  # an unquoted word: a number, true, false, null


class JsonReader:
    """Reads one object. `push` takes one character at a time, and must not be called after DONE or BROKEN."""

    def __init__(self, dialect: Dialect = JSON, brackets: str = "{") -> None:
        """brackets: the characters with which the text may begin; "(" begins the arguments of a Python call, read as an
        object."""
        self._dialect = dialect
        self._brackets = brackets
        self._open: list[str] = []  # open brackets
        self._expect = _Expect.VALUE
        self._is_key = False
        self._quote = ""  # of the string
        self._is_empty = True  # nothing of the string has come
        # Characters read but not yet written. White space alone is not held.
        self._comma = ""  # a comma and the white space after it
        self._held = ""
        self.shown = ""  # the JSON that the last character added

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Returns how many of the last characters are held back."""
        return len(self._comma) + len(self._held)

    @property
    def can_end(self) -> bool:
        """Returns whether closing brackets alone would complete the object here."""
        match self._expect:
            case _Expect.COMMA_OR_END | _Expect.VALUE_OR_END | _Expect.KEY_OR_END:
                return bool(self._open)
            case _Expect.STRING_END:
                return not self._is_key
            case _Expect.WORD:
                return not self._is_key and self._word_json() is not None
        return False

    def end(self) -> str:
        """Returns the JSON that ends the object here. `can_end` must be true."""
        self.shown = ""
        if self._expect is _Expect.WORD:
            self._end_word()
        elif self._expect is _Expect.STRING_END:
            self._end_string()
        self._comma = self._held = ""
        closing = "".join(_closing_json(bracket) for bracket in reversed(self._open))
        self._open.clear()
        return self.shown + closing

    def cut_off(self) -> str | None:
        """Returns the JSON that completes an object that was cut off here: the end of an open string, and all closing
        brackets. Returns None if a word or key is incomplete or a value is missing."""
        self.shown = ""
        if not self._is_key and self._expect in (_Expect.STRING, _Expect.ESCAPE, _Expect.HEX):
            self._show('"')
            self._expect = _Expect.COMMA_OR_END
        shown = self.shown
        return shown + self.end() if self.can_end else None

    def push(self, char: str) -> Status:
        self.shown = ""
        return self._push(char)

    def _push(self, char: str) -> Status:
        match self._expect:
            case _Expect.STRING:
                return self._string(char)
            case _Expect.ESCAPE:
                return self._escape(char)
            case _Expect.HEX:
                return self._hex(char)
            case _Expect.STRING_END:
                return self._string_end(char)
            case _Expect.QUOTE:
                return self._begin_quote(char)
            case _Expect.WORD:
                return self._word(char)
        if char in _SPACE:
            if self._comma:
                self._comma += char
            else:
                self.shown += char
            return Status.GOING
        return self._structure(char)

    def _show(self, text: str) -> None:
        self.shown += self._comma + text
        self._comma = self._held = ""

    # ---- brackets, commas, colons

    def _structure(self, char: str) -> Status:
        match self._expect:
            case _Expect.COLON if char in self._dialect.colons:
                self._show(":")
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_END if char == ",":
                self._comma = ","
                in_object = self._open[-1] not in ("[", _TUPLE)
                self._expect = _Expect.KEY_OR_END if in_object else _Expect.VALUE_OR_END
            case _Expect.COMMA_OR_END | _Expect.KEY_OR_END | _Expect.VALUE_OR_END if self.closes(char):
                return self._close(char)
            case _Expect.KEY_OR_END:
                self._is_key = True
                return self._begin_quote(char)
            case _Expect.VALUE | _Expect.VALUE_OR_END:
                return self._value(char)
            case _:
                return Status.BROKEN
        return Status.GOING

    def closes(self, char: str) -> bool:
        """Returns whether the character is the innermost bracket's counterpart."""
        return char == _CLOSING[self._open[-1]]

    def _close(self, char: str) -> Status:
        self._comma = ""  # drops a last comma before a closing bracket
        self._show(_closing_json(self._open.pop()))
        self._expect = _Expect.COMMA_OR_END
        return Status.GOING if self._open else Status.DONE

    def _value(self, char: str) -> Status:
        if char in "{[(":
            if len(self._open) == _MAX_DEPTH or (not self._open and char not in self._brackets):
                return Status.BROKEN
            bracket = _TUPLE if char == "(" and self._open else char
            self._show(_JSON_OPENING.get(bracket, bracket))
            self._open.append(bracket)
            self._expect = _Expect.VALUE_OR_END if bracket in ("[", _TUPLE) else _Expect.KEY_OR_END
            return Status.GOING
        if not self._open:
            return Status.BROKEN
        self._is_key = False
        return self._begin_quote(char)

    # ---- strings

    def _begin_quote(self, char: str) -> Status:
        """Begins a string at a quote, or a word if `char` begins no quote."""
        held = self._held + char
        if held in self._dialect.quotes:
            self._quote = held
            self._is_empty = True
            self._expect = _Expect.STRING
            self._show('"')
        elif any(quote.startswith(held) for quote in self._dialect.quotes):
            self._held = held
            self._expect = _Expect.QUOTE
        elif self._held or not (self._dialect.is_bare or not self._is_key or char.isalnum() or char == "_"):
            return Status.BROKEN
        else:
            self._expect = _Expect.WORD
            return self._word(char)
        return Status.GOING

    def _string(self, char: str) -> Status:
        held = self._held + char
        if held == self._quote:
            self._held = held
            self._expect = _Expect.STRING_END
            return Status.GOING
        self._is_empty &= len(held) < len(self._quote) and self._quote.startswith(held)
        if self._quote.startswith(held):
            self._held = held
        elif char == "\\" and self._quote != self._dialect.raw_quote:
            self._show(escaped(self._held))
            self._held = char
            self._expect = _Expect.ESCAPE
        else:  # only a quote's first character can begin another quote
            again = char if self._held and self._quote.startswith(char) else ""
            self._show(escaped(held.removesuffix(again) if again else held))
            self._held = again
        return Status.GOING

    def _escape(self, char: str) -> Status:
        self._expect = _Expect.STRING
        if char == "u":
            self._held += char
            self._expect = _Expect.HEX
        elif char in _ESCAPES:
            self._show("\\" + char)
        elif char == "'":
            self._show(char)
        else:  # the backslash stands for itself
            self._show("\\\\" + escaped(char))
        return Status.GOING

    def _hex(self, char: str) -> Status:
        if char in _HEX:
            self._held += char
            if len(self._held) == len("\\u1234"):
                self._show(self._held)
                self._expect = _Expect.STRING
            return Status.GOING
        self._show(escaped(self._held))
        self._expect = _Expect.STRING
        return self._string(char)

    def _string_end(self, char: str) -> Status:
        if self._quote == self._dialect.raw_quote and (status := self._next_key(char)) is not None:
            return status
        if self._held.removeprefix(self._quote).strip():  # text, of a string that has its quotes within
            self._show(escaped(self._held))
            self._expect = _Expect.STRING
            return self._string(char)
        if char in _SPACE:
            self._held += char
            return Status.GOING
        if char in self._behind_string():
            self._end_string()
            return self._structure(char)
        held = self._held
        if char == held and self._is_empty and not self._is_key:  # the third of Python's quotes
            self._quote, self._held = char * 3, ""
            self._is_empty = False
            self._expect = _Expect.STRING
            return Status.GOING
        if char in self._dialect.colons and not self._is_key:
            return Status.BROKEN  # the string was never closed
        if self._quote.startswith(char) and held != self._quote:
            return Status.BROKEN  # two strings in a row
        self._show(escaped(held))  # the quote belongs to the string
        self._expect = _Expect.STRING
        return self._string(char)

    def _next_key(self, char: str) -> Status | None:
        """Reads a key that follows a value in tags without a comma. Returns None if `char` is not part of one."""
        if self._is_key or self._open[-1] in ("[", _TUPLE):
            return None
        key = self._held.removeprefix(self._quote)
        if key.strip() and char in self._dialect.colons and _KEY.fullmatch(key.strip()):
            self._held = self._quote
            self._end_string()
            self._comma, self._held, self._is_key, self._expect = ",", key.strip(), True, _Expect.WORD
            return self._word(char)
        if (char.isalnum() or char == "_" or (key.strip() and char == "-")) and len(key) < _MAX_KEY:
            self._held += char
            return Status.GOING
        return None

    def _end_string(self) -> None:
        self._show('"' + self._held.removeprefix(self._quote))
        self._expect = _Expect.COLON if self._is_key else _Expect.COMMA_OR_END

    # ---- words

    def _word(self, char: str) -> Status:
        if self._is_text_with_commas(char):
            return self._word_with_commas(char)
        if char in self._behind_string():
            if self._word_json() is None:
                return Status.BROKEN
            self._end_word()
            return self._structure(char)
        if char in _SPACE and not self._dialect.is_bare and self._word_json() is not None:
            self._end_word()
            self.shown += char
            return Status.GOING
        if self._is_key:
            fits = char not in "{}[],\n" if self._dialect.is_bare else char.isalnum() or char in "_-$."
        else:
            fits = self._dialect.is_bare or char.isalnum() or char in "+-."
        if not fits:
            return Status.BROKEN
        self._held += char
        return Status.GOING if len(self._held) <= _MAX_WORD else Status.BROKEN

    def _is_text_with_commas(self, char: str) -> bool:
        """Returns whether the word is an object's text without quotes, and has a comma or is followed by one."""
        if self._is_key or not self._dialect.is_bare or self._open[-1] in ("[", _TUPLE):
            return False
        return "," in self._held or (char == "," and (self._word_json() or "").startswith('"'))

    def _word_with_commas(self, char: str) -> Status:
        """Reads on in a text without quotes. A comma ends it only before a key or a bracket."""
        word, comma, rest = self._held.rpartition(",")
        key = rest.strip()
        if self.closes(char):
            self._held = self._held if key else word
            self._end_word()
            return self._structure(char)
        is_quote = comma and not key and any(quote.startswith(char) for quote in self._dialect.quotes)
        if is_quote or (comma and char in self._dialect.colons and _NAME.fullmatch(key)):
            self._held = word
            self._end_word()
            self._structure(",")
            if is_quote:
                return self._structure(char)
            self._held, self._is_key, self._expect = key, True, _Expect.WORD
            return self._word(char)
        self._held += char
        return Status.GOING if len(self._held) <= _MAX_WORD else Status.BROKEN

    def _behind_string(self) -> str:
        """Returns the characters that may follow a string or a word."""
        return self._dialect.colons if self._is_key else "," + _CLOSING[self._open[-1]]

    def _word_json(self) -> str | None:
        word = self._held.strip().removesuffix(
            self._dialect.raw_quote or "\n"
        )  # a string without its first tag
        if self._is_key:
            return f'"{escaped(word)}"' if word else None
        if (json := json_of_word(word)) is not None:
            return json
        return f'"{escaped(word)}"' if word and self._dialect.is_bare else None

    def _end_word(self) -> None:
        self._show(self._word_json() or "")
        self._expect = _Expect.COLON if self._is_key else _Expect.COMMA_OR_END


def _closing_json(bracket: str) -> str:
    return _JSON_CLOSING.get(bracket, _CLOSING[bracket])


def as_json(text: str) -> str | None:
    """Returns a complete object or array as valid JSON; None if the text is neither."""
    reader = JsonReader(brackets="{[")
    pieces = []
    status = Status.GOING
    for char in text:
        if status is not Status.GOING:
            return None
        status = reader.push(char)
        pieces.append(reader.shown)
    return "".join(pieces) if status is Status.DONE else None
