"""The text around a call that a grammar enforces."""

from __future__ import annotations

from dataclasses import dataclass

from .tool_calls import CallTags


@dataclass(frozen=True, slots=True)
class GuidedTags:
    """Around an argument in tags, in the order of the text: `before_key`, the key, `before_value`, the value,
    `before_close` (not where the value is any text), `value_close`, `behind`."""

    before_key: str
    before_value: str
    before_close: str
    value_close: str
    behind: str
    optional_lines: bool = False  # models of the format differ in whether they write line ends


@dataclass(frozen=True, slots=True)
class GuidedCalls:
    """In the order of the text: `open`, `before_name`, the tool's name, `before_arguments`, the arguments, `behind`,
    `close`. With `is_block`, further calls come before `close`; otherwise each has its own `open` and `close`."""

    open: str
    before_name: str
    before_arguments: str
    behind: str
    close: str
    separator: str  # between one call and the next
    is_block: bool
    tags: GuidedTags | None = None  # None: the arguments are JSON
    numbered: bool = False  # a colon and a number stand behind the name


def hermes_between(tags: CallTags) -> GuidedCalls:
    """Returns Qwen3's form between any tags: for tools whose arguments the model's own tags cannot be held to."""
    return GuidedCalls(tags.open, '\n{"name": "', '", "arguments": ', "}\n", tags.close, "\n", is_block=False)
