"""DeepSeek's calls. A block holds any number of them. V3 and R1 write the first form, V3.1 the second:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
```json
{"key": "value"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{"key": "value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls
from .separated import SeparatedSyntax
from .tool_calls import CallTags

CALL_OPEN: Final = "<｜tool▁call▁begin｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
CALL_CLOSE: Final = "<｜tool▁call▁end｜>"
FENCE: Final = "```"
_FENCE_OPEN: Final = FENCE + "json"


def name_of(text: str) -> str:
    """Returns the tool's name, or kind; "" if there is none."""
    name = text.strip()
    return "" if any(char.isspace() for char in name) else name


TAGS: Final = CallTags(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    bare=CALL_OPEN,
    following=CALL_OPEN,
    ends=(FENCE, CALL_CLOSE),
)
SYNTAX: Final = SeparatedSyntax(
    CALL_OPEN,
    SEPARATOR,
    CALL_CLOSE,
    (FENCE, TAGS.close),
    fence=_FENCE_OPEN,
    name_of=name_of,
    needs_separator=False,
)
GUIDED: Final = GuidedCalls(  # V3.1's
    open=TAGS.open,
    before_name=CALL_OPEN,
    before_arguments=SEPARATOR,
    behind=CALL_CLOSE,
    close=TAGS.close,
    separator="",
    is_block=True,
)
GUIDED_V3: Final = GuidedCalls(
    open=TAGS.open,
    before_name=f"{CALL_OPEN}function{SEPARATOR}",
    before_arguments=f"\n{_FENCE_OPEN}\n",
    behind=f"\n{FENCE}{CALL_CLOSE}",
    close=TAGS.close,
    separator="\n",
    is_block=True,
)
