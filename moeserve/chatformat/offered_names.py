"""The tool that a call's name means. Models add parts of the format or the API to a name: a prefix such as
`functions.`, the call's number, quotes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

# `functions.f`, `functions_f`, `functionsf`, `default_api.f` (Gemini's), `assistant.functions.f`.
_PREFIX: Final = re.compile(r"(?:assistant[./:])?(?:functions?|tools?|default_api|call)[./:_]?")
_NUMBER: Final = re.compile(r"(?:[:._-]?\d+|:call\w*)$")  # `f:0`, `f_0`, `f5`
_AROUND: Final = " \t\"'`()<>=:"


def offered_name(name: str, offered: Collection[str]) -> str:
    """Returns the offered tool that `name` means. A name that is offered, or that means no tool, is unchanged."""
    return next((one for one in _readings(name) if one in offered), name)


def _readings(name: str) -> Iterator[str]:
    """Yields the name, then the name without such additions, fewest removed first."""
    bare = name.strip(_AROUND)
    last = re.split(r"[./:]", _NUMBER.sub("", bare))[-1]  # of `namespace.f`
    for one in (name, bare, _NUMBER.sub("", bare)):
        yield one
        if (match := _PREFIX.match(one)) is not None:
            yield one[match.end() :]
            yield _NUMBER.sub("", one[match.end() :])
    yield last
