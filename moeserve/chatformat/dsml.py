"""DSML: the calls of DeepSeek-V3.2 and V4. A block holds any number of calls; V3.2 names it `function_calls`, V4
`tool_calls`:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="name">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>

`string` says whether the value is a text or JSON. Models also write the arguments as one JSON object, omit the block's
tags or misspell them, and omit `｜DSML｜` in an argument's tags.
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls, GuidedTags
from .tag_heads import attributes_head
from .tool_calls import CallTags
from .value_end import TaggedSyntax

MARK: Final = "｜DSML｜"  # a token
# Names of blocks.
_NAMES: Final = ("tool_calls", "function_calls", "toolcalls", "tool_call", "toolcall", "tool_use", "calls")
_INVOKE: Final = f"<{MARK}invoke"

SYNTAX: Final = TaggedSyntax(
    name_open=_INVOKE,
    name_close=">",
    key_open=f"<{MARK}parameter",
    key_close=">",
    value_open="",
    value_close=f"</{MARK}parameter>",
    close=f"</{MARK}invoke>",
    head=attributes_head,
    other_key_open="<parameter",
    other_value_closes=("</parameter>",),
)


def tags(block: str) -> CallTags:
    """Returns the tags of a block with this name."""
    others = [name for name in _NAMES if name != block]
    return CallTags(
        f"<{MARK}{block}>",
        f"</{MARK}{block}>",
        other_opens=tuple(f"<{MARK}{name}>" for name in others),
        bare=_INVOKE,
        following=_INVOKE,
        ends=(SYNTAX.value_close, SYNTAX.close, *(f"</{MARK}{name}>" for name in others)),
    )


def _guided(block: str, before_arguments: str, behind: str, in_tags: GuidedTags | None) -> GuidedCalls:
    return GuidedCalls(
        open=f"<{MARK}{block}>",
        before_name=f'\n{_INVOKE} name="',
        before_arguments=before_arguments,
        behind=behind,
        close=f"\n</{MARK}{block}>",
        separator="",
        is_block=True,
        tags=in_tags,
    )


def guided(block: str) -> GuidedCalls:
    """Returns the form that a grammar enforces, with the arguments as one JSON object."""
    return _guided(block, '">\n', "\n" + SYNTAX.close, None)


def own_calls(block: str) -> GuidedCalls:
    typed = '" string="{}">'.format
    in_tags = GuidedTags(
        f'{SYNTAX.key_open} name="',
        typed("true"),
        "",
        SYNTAX.value_close,
        "\n",
        before_json=typed("false"),
    )
    return _guided(block, '">\n', SYNTAX.close, in_tags)
