"""Hunyuan 3's calls. A block holds any number of them. In published models each tag has a suffix:
`<tool_calls:opensource>`.

<tool_calls>
<tool_call>name<tool_sep>
<arg_key>key</arg_key>
<arg_value>value</arg_value>
</tool_call>
</tool_calls>

Models also omit the block's tags.
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls, GuidedTags
from .tool_calls import CallTags
from .value_end import TaggedSyntax

SUFFIX: Final = ":opensource"  # templates write it apart from the tags


def tags(suffix: str) -> CallTags:
    one = f"<tool_call{suffix}>"
    return CallTags(
        f"<tool_calls{suffix}>",
        f"</tool_calls{suffix}>",
        bare=one,
        following=one,
        ends=(f"</arg_value{suffix}>", f"</tool_call{suffix}>"),
    )


def syntax(suffix: str) -> TaggedSyntax:
    return TaggedSyntax(
        name_open=f"<tool_call{suffix}>",
        name_close=f"<tool_sep{suffix}>",
        key_open=f"<arg_key{suffix}>",
        key_close=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>",
        value_close=f"</arg_value{suffix}>",
        close=f"</tool_call{suffix}>",
    )


def own_calls(suffix: str) -> GuidedCalls:
    outer, inner = tags(suffix), syntax(suffix)
    return GuidedCalls(
        open=outer.open,
        before_name="\n" + inner.name_open,
        before_arguments=inner.name_close + "\n",
        behind=inner.close,
        close="\n" + outer.close,
        separator="",
        is_block=True,
        tags=GuidedTags(
            inner.key_open, f"{inner.key_close}\n{inner.value_open}", "", inner.value_close, "\n"
        ),
    )
