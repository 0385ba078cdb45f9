"""The calls of GLM-4.5 to 4.7 (4.7 writes them without line ends):

<tool_call>name
<arg_key>key</arg_key>
<arg_value>value</arg_value>
</tool_call>
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls, GuidedTags
from .tool_calls import CallTags
from .value_end import TaggedSyntax

TAGS: Final = CallTags("<tool_call>", "</tool_call>")
SYNTAX: Final = TaggedSyntax(
    name_open="",
    name_close="",
    key_open="<arg_key>",
    key_close="</arg_key>",
    value_open="<arg_value>",
    value_close="</arg_value>",
    close="</tool_call>",
    other_value_closes=("</arg_key>",),
)
OWN_CALLS: Final = GuidedCalls(
    open=TAGS.open,
    before_name="",
    before_arguments="\n",
    behind="",
    close=TAGS.close,
    separator="\n",
    is_block=False,
    tags=GuidedTags("<arg_key>", "</arg_key>\n<arg_value>", "", "</arg_value>", "\n", optional_lines=True),
)
