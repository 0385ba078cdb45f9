"""Finds the end of a value in tags. The value is plain text that may contain the format's own tags: it may be a file
about tool calls.

A closing tag ends the value only if the format's next tag follows it. The next tag without a closing tag also ends the
value, if it cannot be part of the value: models omit closing tags. A complete call within a value is part of the value.

    <parameter=a>              where does the value of `a` end?
    text </parameter> text     not here: text follows the tag
    text
    </parameter>               here, before `<parameter=b>`; without this tag, `<parameter=b>` would end it
    <parameter=b>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from .call_body import MAX_NAME_CHARS
from .tag_heads import TagHead, plain_head
from .tool_calls import CallTags

_NAME: Final = re.compile(r"([^\n<]*)(.*)", re.DOTALL)
_KEY_CHAR: Final = re.compile(r"[\w.-]")
_BARE_KEY: Final = re.compile(r"[\w.-]{1,64}\s{0,8}")
_MAX_JUNK: Final = 16  # extra characters in a damaged closing tag such as `</parameter1>`


@dataclass(frozen=True, slots=True)
class TaggedSyntax:
    """The tags of a call in order; white space may come between them."""

    name_open: str  # "": the call begins with the name
    name_close: str  # "": a line end or the next tag ends the name
    key_open: str
    key_close: str
    value_open: str  # "": the value follows the key directly
    value_close: str
    close: str
    trims_line_ends: bool = False  # one line end before and one after a value belong to the format
    trims_pairs: bool = False  # `trims_line_ends` holds only for a value that begins with a line end
    # Reads the text between the tags of a name or a key.
    head: Callable[[str], TagHead | None] = plain_head
    # Other spellings of `key_open` and `value_close`, which a value may contain as text. Another `value_close` ends a
    # value only before a usual tag of the format; the other `key_open` begins a key only after a usual tag.
    other_key_open: str = ""
    other_value_closes: tuple[str, ...] = ()


class _Kind(Enum):
    SPACE = auto()
    VALUE_CLOSE = auto()
    DAMAGED = auto()  # a damaged closing tag
    KEY = auto()  # a key's opening tag with the key
    OTHER_KEY = auto()  # KEY in its other spelling
    CLOSE = auto()
    OUTER_CLOSE = auto()
    OUTER_OPEN = auto()
    NAME = auto()  # a name's opening tag with the name


_CLOSES: Final = (_Kind.VALUE_CLOSE, _Kind.DAMAGED)
_ENDS: Final = (_Kind.CLOSE, _Kind.OUTER_CLOSE)
_NEXT_CALL: Final = (_Kind.OUTER_OPEN, _Kind.NAME)


class _Verdict(Enum):
    ENDS = auto()
    TEXT = auto()
    OPEN = auto()  # undecided: depends on the text that follows


@dataclass(slots=True)
class _Piece:
    kind: _Kind
    text: str
    read_as: str = ""  # the text for the call's reader if tags are repeated or missing in `text`; "": `text`


class ValueEnd:
    """Reads one value, which begins after its opening tag."""

    def __init__(
        self,
        syntax: TaggedSyntax,
        tags: CallTags,
        key: str,
        may_follow: Callable[[str], bool],
        is_guided: bool,
    ) -> None:
        """may_follow: whether the tool has an argument of this name that has not come yet. is_guided: a grammar ensures
        that a closing tag before the format's next tag is never part of the value."""
        self._syntax = syntax
        self._may_follow = may_follow
        self._is_guided = is_guided
        self._fixed = {
            syntax.value_close: _Kind.VALUE_CLOSE,
            syntax.close: _Kind.CLOSE,
            tags.open: _Kind.OUTER_OPEN,
            tags.close: _Kind.OUTER_CLOSE,
        }
        self._named: list[tuple[str, tuple[str, ...], _Kind]] = [
            (syntax.key_open, (syntax.key_close, syntax.value_open or syntax.key_close), _Kind.KEY)
        ]
        if syntax.name_open:
            self._named.append((syntax.name_open, (syntax.name_close,), _Kind.NAME))
        if not is_guided:
            self._fixed.setdefault(f"</{key}>", _Kind.DAMAGED)
            for close in syntax.other_value_closes:
                self._fixed.setdefault(close, _Kind.DAMAGED)
            if syntax.other_key_open:
                self._named.append((syntax.other_key_open, (syntax.key_close,), _Kind.OTHER_KEY))
        # The tags that delimit a call within the value: the name's tags, or the outer tags if the name has no tags.
        self._nests = _Kind.NAME if syntax.name_open else _Kind.OUTER_OPEN
        self._unnests = self._fixed[syntax.close]
        self._num_nested = 0  # open calls within the value
        self._is_trimmed: bool | None = (
            False if not syntax.trims_line_ends else None
        )  # None: its first character tells
        self._held = ""  # the beginning of a possible tag
        self._space: list[str] = []  # white space; the next tag decides whether it belongs to the value
        self._pieces: list[_Piece] = []  # undecided tags with the white space before them
        self.unread = ""  # the text after the value and its closing tag

    @property
    def num_held(self) -> int:
        """Returns how many of the last characters are held back."""
        return len(self._held) + len(self._space) + sum(len(piece.text) for piece in self._pieces)

    def push(self, char: str) -> tuple[str, bool]:
        """Returns the text that certainly belongs to the value, and whether the value has ended."""
        if self._is_trimmed is None:
            self._is_trimmed = not self._syntax.trims_pairs or char in "\r\n"
        if self._held:
            return self._push_tag(char)
        if char == "<" or (self._may_be_key and _KEY_CHAR.fullmatch(char)):
            self._held = char
            return "", False
        if char.isspace():
            self._space.append(char)
            return "", False
        return self._as_text() + char, False

    @property
    def _may_be_key(self) -> bool:
        """True if a key may follow whose opening tag is missing: directly behind the value's closing tag."""
        if self._is_guided or not self._syntax.value_open or not self._pieces:
            return False
        return self._pieces[-1].kind is _Kind.VALUE_CLOSE

    def finish(self) -> tuple[str, bool]:
        """Ends the answer. Returns as `push` does."""
        if self._held:
            kind = self._without_bracket(self._held)
            if kind is None:
                return "", False
            self._take_space()
            self._pieces.append(_Piece(kind, self._held, self._held + ">"))
            self._held = ""
        return self._decide(is_end=True)

    def _push_tag(self, char: str) -> tuple[str, bool]:
        held = self._held + char
        kind = self._kind_of(held)
        if kind is not None:
            self._held = ""
            behind = char if char.isspace() else ""  # the tag lacks its closing bracket
            self._take_space()
            self._pieces.append(_Piece(kind, held.removesuffix(behind), self._complete(kind, held)))
            self._space += behind
            return self._decide(is_end=False)
        if self._may_become_tag(held):
            self._held = held
            return "", False
        at = 0 if self._held[0] == "<" else self._held.find("<")
        rest = self._held[at:] + char if at > 0 else char  # a tag may begin in it
        text = self._as_text() + self._held.removesuffix(rest[:-1])
        self._held = ""
        has_ended = False
        for one in rest:
            more, has_ended = self.push(one)
            text += more
        return text, has_ended

    def _take_space(self) -> None:
        if self._space:
            self._pieces.append(_Piece(_Kind.SPACE, "".join(self._space)))
            self._space.clear()

    # ---- tags

    def _kind_of(self, text: str) -> _Kind | None:
        if text in self._fixed:
            return self._fixed[text]
        if text[-1].isspace() and (kind := self._without_bracket(text[:-1])) is not None:
            return kind
        if text[0] != "<":
            is_key = text.endswith(self._syntax.key_close)
            return _Kind.KEY if is_key and self._may_follow(self._bare_key(text)) else None
        text = self._without_repeats(text)
        if text.startswith(self._syntax.key_open) and text[-1] == "\n" and not self._syntax.value_open:
            return _Kind.KEY if not self._is_guided and self._may_follow(self._key_of(text)) else None
        for opening, closes, kind in self._named:
            if text.startswith(opening) and any(
                text.endswith(c) and self._syntax.head(text[len(opening) : -len(c)]) for c in closes
            ):
                return kind
        if self._is_damaged(text[:-1]) and (text[-1] == ">" or text[-1].isspace()):
            return _Kind.DAMAGED
        return None

    def _may_become_tag(self, text: str) -> bool:
        if any(tag.startswith(text) for tag in self._fixed) or self._is_damaged(text):
            return True
        if text[0] != "<":
            key, tag, rest = text.partition("<")
            return _BARE_KEY.fullmatch(key) is not None and self._syntax.key_close.startswith(tag + rest)
        text = self._without_repeats(text)
        return any(
            opening.startswith(text) or (text.startswith(opening) and _is_name(text[len(opening) :], closes))
            for opening, closes, _ in self._named
        )

    def _is_damaged(self, text: str) -> bool:
        """Returns whether the text may be a closing tag with a damaged end."""
        start = self._syntax.value_close[:-1]
        if self._is_guided or not text.startswith(start) or len(text) > len(start) + _MAX_JUNK:
            return False
        return not any(char in "<>" or char.isspace() for char in text[len(start) :])

    def _without_repeats(self, text: str) -> str:
        """Returns the text without repeated opening tags at its start."""
        opening = self._syntax.key_open
        if self._syntax.value_open and not self._is_guided:
            while text.startswith(opening) and text[len(opening) :].lstrip().startswith("<"):
                rest = text[len(opening) :].lstrip()
                if not opening.startswith(rest[: len(opening)]):
                    break
                text = rest
        return text

    def _without_bracket(self, text: str) -> _Kind | None:
        """Returns the kind of a closing tag that lacks its last bracket; None if the text is none."""
        return self._fixed.get(text + ">") if text.startswith("</") and not self._is_guided else None

    def _bare_key(self, text: str) -> str:
        return text.removesuffix(self._syntax.key_close).strip()

    def _complete(self, kind: _Kind, text: str) -> str:
        """Returns a tag as its format has it."""
        if kind is _Kind.KEY and text[0] != "<":
            return self._syntax.key_open + text
        if kind is _Kind.KEY:
            text = self._without_repeats(text)
            return text[:-1] + self._syntax.key_close if text[-1] == "\n" else text
        return text[:-1] + ">" if text[-1].isspace() and kind in _ENDS else ""

    def _key_of(self, text: str) -> str:
        key = text.removeprefix(self._syntax.key_open).removesuffix(self._syntax.key_close)
        head = self._syntax.head(key.removesuffix(self._syntax.value_open))
        return "" if head is None else head.name

    # ---- decisions

    def _as_text(self) -> str:
        """Returns the held tags as text. They do not end the value, because no tag follows them."""
        self._take_space()
        for piece in self._pieces:
            self._count(piece)
        text = "".join(piece.text for piece in self._pieces)
        self._pieces.clear()
        return text

    def _count(self, piece: _Piece) -> None:
        """Updates the count of open calls within the value."""
        if piece.kind is self._nests:
            self._num_nested += not self._is_guided
        elif piece.kind is self._unnests and self._num_nested:
            self._num_nested -= 1

    def _decide(self, is_end: bool) -> tuple[str, bool]:
        text = ""
        while (at := self._first_tag()) is not None:
            tag = self._pieces[at]
            following = [piece for piece in self._pieces[at + 1 :] if piece.kind is not _Kind.SPACE]
            match self._judged(tag, following, is_end):
                case _Verdict.OPEN:
                    return text, False
                case _Verdict.ENDS:
                    return text + self._ended(at), True
            text += "".join(piece.text for piece in self._pieces[: at + 1])
            self._count(tag)
            del self._pieces[: at + 1]
        return text, False

    def _first_tag(self) -> int | None:
        return next((at for at, piece in enumerate(self._pieces) if piece.kind is not _Kind.SPACE), None)

    def _ended(self, at: int) -> str:
        """Ends the value before the tag. Returns the white space before the tag that belongs to the value."""
        self._take_space()
        space, tag = "".join(piece.text for piece in self._pieces[:at]), self._pieces[at]
        is_close = tag.kind in _CLOSES
        self.unread = "".join(piece.read_as or piece.text for piece in self._pieces[at + is_close :])
        self._pieces.clear()
        if tag.kind is _Kind.VALUE_CLOSE:
            return without_line_end(space) if self._is_trimmed else space
        return (
            space.rpartition("\n")[0] if "\n" in space else space
        )  # the line end before the next tag belongs to the format

    def _judged(self, tag: _Piece, following: Sequence[_Piece], is_end: bool) -> _Verdict:
        """Returns whether the tag ends the value. following: the tags after it with only white space between them."""
        if tag.kind in _CLOSES:
            return self._close_judged(tag, following, is_end)
        if self._is_guided:
            return _Verdict.TEXT
        if tag.kind in _ENDS:
            return self._end_judged([tag, *following], is_end)
        if (
            tag.kind is _Kind.KEY
            and not self._num_nested
            and self._may_follow(self._key_of(tag.read_as or tag.text))
        ):
            return _Verdict.ENDS
        return _Verdict.TEXT

    def _close_judged(self, close: _Piece, following: Sequence[_Piece], is_end: bool) -> _Verdict:
        if not following:
            return _Verdict.ENDS if is_end else _Verdict.OPEN
        tag = following[0]
        if tag.kind in _CLOSES:
            return _Verdict.TEXT
        if tag.kind is _Kind.OTHER_KEY:
            is_own = close.kind is _Kind.VALUE_CLOSE and not self._num_nested
            return _Verdict.ENDS if is_own else _Verdict.TEXT
        if tag.kind is _Kind.KEY and self._num_nested:
            return _Verdict.ENDS if self._may_follow(self._key_of(tag.read_as or tag.text)) else _Verdict.TEXT
        return self._end_judged(following, is_end) if self._num_nested else _Verdict.ENDS

    def _end_judged(self, tags: Sequence[_Piece], is_end: bool) -> _Verdict:
        """Returns what tags that end a call do: they end the outer call, which lacks the value's closing tag, or a call
        within the value."""
        kinds = [tag.kind for tag in tags]
        num_ends = next((at for at, kind in enumerate(kinds) if kind not in _ENDS), len(kinds))
        if num_ends > len(_ENDS):
            return _Verdict.TEXT
        if num_ends == len(kinds):
            return _Verdict.ENDS if is_end else _Verdict.OPEN
        is_next_call = kinds[num_ends] in _NEXT_CALL and not self._num_nested
        is_next_call |= kinds[num_ends] is _Kind.OUTER_OPEN and _Kind.OUTER_CLOSE in kinds[:num_ends]
        return _Verdict.ENDS if is_next_call else _Verdict.TEXT


def without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _is_name(text: str, closes: Sequence[str]) -> bool:
    """Returns whether the text may begin a name followed by one of its closing tags."""
    if closes[0].startswith("<"):
        text = text.lstrip()
    name, rest = _NAME.fullmatch(text).groups()  # type: ignore[union-attr]  # it matches every text
    if rest[:1] == "\n" and not closes[0].startswith("<"):
        return False
    return len(name) <= MAX_NAME_CHARS and any(close.startswith(rest.lstrip()) for close in closes)
