"""MiniMax-M2's calls. A block holds any number of them:

<minimax:tool_call>
<invoke name="name">
<parameter name="key">value</parameter>
</invoke>
</minimax:tool_call>

Models also omit the block's tags, or write another block's.
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls, GuidedTags
from .tag_heads import attributes_or_named_head
from .tool_calls import CallTags
from .value_end import TaggedSyntax

TAGS: Final = CallTags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    other_opens=("<tool_call>", "<function_calls>"),
    bare="<invoke",
    following="<invoke",
    ends=("</parameter>", "</invoke>", "</tool_call>", "</function_calls>"),
)
SYNTAX: Final = TaggedSyntax(
    name_open="<invoke",
    name_close=">",
    key_open="<parameter",
    key_close=">",
    value_open="",
    value_close="</parameter>",
    close="</invoke>",
    head=attributes_or_named_head,
)
OWN_CALLS: Final = GuidedCalls(
    open=TAGS.open,
    before_name='\n<invoke name="',
    before_arguments='">\n',
    behind="</invoke>",
    close="\n" + TAGS.close,
    separator="",
    is_block=True,
    tags=GuidedTags('<parameter name="', '">', "", "</parameter>", "\n"),
)
