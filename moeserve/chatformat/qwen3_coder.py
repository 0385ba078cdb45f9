"""Qwen3-Coder's calls, and Qwen3.5's to 3.8's:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Models sometimes omit the outer opening tag.
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls, GuidedTags
from .tag_heads import named_head
from .tool_calls import CallTags
from .value_end import TaggedSyntax

TAGS: Final = CallTags(
    "<tool_call>",
    "</tool_call>",
    bare="<function=",
    ends=("</parameter>", "</function>", "</function_invocation>"),
)
SYNTAX: Final = TaggedSyntax(
    name_open="<function",
    name_close=">",
    key_open="<parameter",
    key_close=">",
    value_open="",
    value_close="</parameter>",
    close="</function>",
    trims_line_ends=True,
    head=named_head,
    other_value_closes=("</param>", "</ parameter>"),
)
OWN_CALLS: Final = GuidedCalls(
    open=TAGS.open,
    before_name="\n<function=",
    before_arguments=">\n",
    behind="</function>\n",
    close=TAGS.close,
    separator="\n",
    is_block=False,
    tags=GuidedTags("<parameter=", ">\n", "\n", "</parameter>", "\n"),
)
