"""The result of one check of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str  # a word or two
    level: Level  # an error keeps a server from starting; with a warning it is slower, or holds less
    text: str
    remedy: str = ""  # what to do about a warning or an error


def as_text(findings: Iterable[Finding]) -> str:
    """Returns a line for each finding, and a line for its remedy if it has one."""
    lines: list[str] = []
    for one in findings:
        lines.append(f"{one.level:<8} {one.subject:<11} {one.text}")
        if one.remedy:
            lines.append(f"{'':<20} -> {one.remedy}")
    return "\n".join(lines)


def as_json(findings: list[Finding]) -> str:
    document = {"ok": not has_errors(findings), "findings": [asdict(one) for one in findings]}
    return json.dumps(document, indent=2)


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(one.level == "error" for one in findings)
