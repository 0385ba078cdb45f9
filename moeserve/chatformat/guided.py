"""The text around calls that a grammar enforces."""

from __future__ import annotations

from dataclasses import dataclass

from .tool_calls import CallTags


@dataclass(frozen=True, slots=True)
class GuidedTags:
    """The text around an argument in tags, in this order: `before_key`, the key, `before_value`, the value,
    `before_close` (omitted if the value is free text), `value_close`, `behind`."""

    before_key: str
    before_value: str
    before_close: str
    value_close: str
    behind: str
    optional_lines: bool = False  # the line ends are optional, because the format's models differ in them
    # Replaces `before_value` before a value that is JSON; "": `before_value` is written there too.
    before_json: str = ""


@dataclass(frozen=True, slots=True)
class GuidedCalls:
    """The text around calls, in this order: `open`, `before_name`, the tool's name, `before_arguments`, the arguments,
    `behind`, `close`. With `is_block`, further calls come before `close`; otherwise each call has its own `open` and
    `close`."""

    open: str
    before_name: str
    before_arguments: str
    behind: str
    close: str
    separator: str  # between two calls
    is_block: bool
    tags: GuidedTags | None = None  # None: the arguments are JSON
    numbered: bool = False  # a colon and a number follow the name


def hermes_between(tags: CallTags) -> GuidedCalls:
    """Returns Qwen3's JSON form within the given tags. It serves tools whose schemas cannot be enforced in the model's
    own form."""
    return GuidedCalls(tags.open, '\n{"name": "', '", "arguments": ', "}\n", tags.close, "\n", is_block=False)
