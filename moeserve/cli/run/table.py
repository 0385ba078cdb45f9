"""Shows a Markdown table in columns as wide as their cells."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_DELIMITER: Final = re.compile(r":?-+:?\Z")
_BAR: Final = re.compile(r"(?<!\\)\|")
_GAP: Final = " │ "


def table_lines(rows: list[str], columns: int) -> list[str] | None:
    """Returns the lines that show a table, without line feeds; None if the given lines are not a table, or it would be
    wider than the terminal's `columns`."""
    cells = [_cells(row) for row in rows]
    if len(cells) < 2 or not all(_DELIMITER.match(cell) for cell in cells[1]):
        return None
    head, alignment, *body = cells
    count = len(head)
    if len(alignment) != count:
        return None
    shown = [[*row[:count], *[""] * (count - len(row))] for row in [head, *body]]
    widths = [max(_width(row[i]) for row in shown) for i in range(count)]
    if sum(widths) + len(_GAP) * (count - 1) > columns:
        return None
    ends = [cell.endswith(":") and not cell.startswith(":") for cell in alignment]
    lines = [_GAP.join(map(_padded, row, widths, ends)).rstrip() for row in shown]
    rule = "─┼─".join("─" * width for width in widths)
    return [f"\x1b[1m{lines[0]}\x1b[0m", f"\x1b[2m{rule}\x1b[0m", *lines[1:]]


def _cells(row: str) -> list[str]:
    inner = row.strip().removeprefix("|")
    inner = inner[:-1] if inner.endswith("|") and not inner.endswith("\\|") else inner
    return [_plain(cell.strip().replace("\\|", "|")) for cell in _BAR.split(inner)]


def _plain(cell: str) -> str:
    """Returns the text without the marks of bold text and of code, which do not count as width."""
    return re.sub(r"\*\*(\S.*?)\*\*|`([^`]+)`", lambda found: found[1] or found[2], cell)


def _padded(cell: str, width: int, is_right: bool) -> str:
    gap = " " * (width - _width(cell))
    return gap + cell if is_right else cell + gap


def _width(text: str) -> int:
    """Returns the number of terminal columns that the text takes."""
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
