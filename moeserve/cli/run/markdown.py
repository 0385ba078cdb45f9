"""Shows an answer's Markdown in a terminal: headings and emphasis as styles, code in a colour, tables in columns.

Text is shown as soon as its form is known. Held back are: the beginning of a line until its kind is known, a span from
its opening mark to its closing one, a table until it ends. Marks that turn out to have no meaning are shown as the
model wrote them. Code is never changed, so that it can be copied. Source of the rules: CommonMark 0.31 and GitHub's
tables, simplified: a span ends with its line, and `__init__` is a name, not bold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from moeserve.cli.run.table import table_lines

BOLD, DIM, ITALIC, UNDERLINE, STRIKE, CODE = "1", "2", "3", "4", "9", "36"
MOST_HELD: Final = 400  # characters; a longer text between two marks is not a span
MOST_TABLE_ROWS: Final = 500

# The beginning of a line whose kind depends on further characters.
_UNDECIDED: Final = re.compile(
    r" *(?:#{1,6}|[-*_](?: *[-*_])*|[-*+] +\[[ xX]?\]?|\+|\d{1,9}[.)]?|`{1,2}|~{1,2}|>)? *\Z"
)
_WHOLE_LINE: Final = re.compile(r" *(?:`{3,}|~{3,}|\|)")  # kinds that are known only from the whole line
_HEADING: Final = re.compile(r" {0,3}(#{1,6}) +")
_TASK: Final = re.compile(r"( *)[-*+] +\[([ xX])\] ")
_ITEM: Final = re.compile(r"( *)[-*+] +")
_QUOTE: Final = re.compile(r" {0,3}> ?")
_RULE: Final = re.compile(r" {0,3}([-*_])(?: *\1){2,} *\Z")
_FENCE: Final = re.compile(r" *(`{3,}|~{3,})([^`]*)\Z")


class _Span(NamedTuple):
    pattern: re.Pattern[str]  # group 1: the text between the marks
    style: str


_SPANS: Final = (
    _Span(re.compile(r"(?<!`)(?:`)([^`]+)`(?!`)"), CODE),
    _Span(re.compile(r"``(?!`)(.+?)(?<!`)``(?!`)"), CODE),
    _Span(re.compile(r"\*\*\*(?![\s*])(.+?)(?<![\s*])\*\*\*"), f"{BOLD};{ITALIC}"),
    _Span(re.compile(r"\*\*(?![\s*])(.+?)(?<![\s*])\*\*(?!\*)"), BOLD),
    _Span(re.compile(r"\*(?![\s*])((?:\*\*|[^*])+?)(?<![\s*])\*(?!\*)"), ITALIC),
    _Span(re.compile(r"(?<!\w)_(?![\s_])([^_]+)(?<![\s_])_(?![\w_])"), ITALIC),
    _Span(re.compile(r"~~(?![\s~])(.+?)(?<![\s~])~~(?!~)"), STRIKE),
)
_OPENING: Final = re.compile(r"`+|\*+|_+|~~|\\")
_ESCAPED: Final = re.compile(r"\\([*_`~#|>])")  # not brackets, which begin a formula: \(x\), \[x\]


class MarkdownView:
    """Takes an answer in pieces and returns what to show.

    Every piece ends the styles that it begins, so that the terminal keeps no style however the program ends. columns:
    returns the terminal's current width.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns: Final = columns
        self._line = ""  # the part of the line that is not shown yet
        self._is_head = True  # the line's kind is not yet known
        self._previous = " "  # the character before `_line`
        self._style = ""  # style of the whole line
        self._fence = ""  # the mark that closes the code block
        self._table: list[str] = []

    def take(self, text: str) -> str:
        """Returns what can be shown after this piece of text, which must not contain escape sequences."""
        shown = []
        *lines, rest = text.split("\n")
        for line in lines:
            self._line += line
            shown.append(self._end_line())
        self._line += rest
        shown.append(self._flow())
        return "".join(shown)

    def end(self) -> str:
        """Returns the text that is still held back when an answer ends, or is cut off, without a line feed."""
        if not self._line:
            return self._end_table()
        return (self._end_line() + self._end_table()).removesuffix("\n")

    def _end_line(self) -> str:
        shown = self._whole_line() if self._is_head else self._inline(is_whole=True) + "\n"
        self._line, self._is_head, self._previous, self._style = "", True, " ", ""
        return shown

    def _flow(self) -> str:
        """Returns what can be shown of a line that is not complete yet."""
        if self._is_head:
            if not self._line or self._fence:
                return self._code_so_far()
            if _UNDECIDED.match(self._line) or _WHOLE_LINE.match(self._line):
                return ""
            shown = self._end_table() + self._begin_line()
            return shown + self._inline(is_whole=False)
        return self._inline(is_whole=False)

    def _code_so_far(self) -> str:
        """Returns what can be shown of a line of code: all of it, unless it may be the closing fence."""
        if not self._line or self._fence[0] in self._line.strip()[:1] or not self._line.strip():
            return ""
        shown, self._line, self._is_head, self._style = self._line, "", False, CODE
        return _styled(shown, CODE)

    def _whole_line(self) -> str:
        line = self._line
        if self._fence:
            mark = line.strip()
            if len(mark) >= len(self._fence) and set(mark) == {self._fence[0]}:
                self._fence = ""
                return _styled(line, DIM) + "\n"
            return _styled(line, CODE) + "\n"
        if line.lstrip().startswith("|") and len(self._table) < MOST_TABLE_ROWS:
            self._table.append(line)
            return ""
        before = self._end_table()
        if fence := _FENCE.match(line):
            self._fence = fence[1]
            return before + _styled(line, DIM) + "\n"
        if _RULE.match(line):
            return before + _styled("─" * min(40, self._columns()), DIM) + "\n"
        return before + self._begin_line() + self._inline(is_whole=True) + "\n"

    def _begin_line(self) -> str:
        """Takes the characters that decide the line's kind, and returns what to show for them."""
        self._is_head = False
        line = self._line
        if found := _HEADING.match(line):
            self._style = f"{BOLD};{UNDERLINE}" if len(found[1]) == 1 else BOLD
            shown = ""
        elif found := _TASK.match(line):
            shown = found[1] + ("☐ " if found[2] == " " else "☑ ")
        elif found := _ITEM.match(line):
            shown = f"{found[1]}• "
        elif found := _QUOTE.match(line):
            self._style, shown = ITALIC, _styled("│ ", DIM)
        else:
            return ""
        self._line = line[found.end() :]
        return shown

    def _inline(self, *, is_whole: bool) -> str:
        if self._fence:
            shown, self._line = self._line, ""
            return _styled(shown, CODE)
        shown, left = _inline(self._line, self._style, self._previous, is_whole)
        taken = self._line[: len(self._line) - left]
        self._line = self._line[len(taken) :]
        self._previous = taken[-1:] or self._previous
        return shown

    def _end_table(self) -> str:
        rows, self._table = self._table, []
        if not rows:
            return ""
        lines = table_lines(rows, self._columns())
        if lines is None:  # not a table, or too wide
            return "".join(f"{inline(row)}\n" for row in rows)
        return "".join(f"{line}\n" for line in lines)


def inline(text: str, style: str = "") -> str:
    """Returns a whole text without line feeds, with its spans as styles."""
    return _inline(text, style, " ", is_whole=True)[0]


def _inline(text: str, style: str, previous: str, is_whole: bool) -> tuple[str, int]:
    """Returns what to show of the text, and how many characters at its end to hold back. previous: the character before
    the text."""
    shown, at, whole = list[str](), 1, previous + text
    while opening := _OPENING.search(whole, at):
        shown.append(_styled(whole[at : opening.start()], style))
        at = opening.start()
        if escaped := _ESCAPED.match(whole, at):
            shown.append(_styled(escaped[1], style))
            at = escaped.end()
            continue
        until = at + MOST_HELD
        found = next(
            ((span, match) for span in _SPANS if (match := span.pattern.match(whole, at, until))), None
        )
        rest = len(whole) - at
        # A mark at the end may yet be longer: ** of ***.
        if not is_whole and rest <= MOST_HELD and (found is None or found[1].end() == len(whole)):
            return "".join(shown), rest
        if found is None:
            shown.append(_styled(opening[0], style))
            at = opening.end()
            continue
        span, match = found
        within = f"{style};{span.style}" if style else span.style
        shown.append(_styled(match[1], within) if span.style == CODE else inline(match[1], within))
        at = match.end()
    shown.append(_styled(whole[at:], style))
    return "".join(shown), 0


def _styled(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if text and style else text
