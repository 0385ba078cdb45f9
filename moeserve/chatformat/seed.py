"""Seed-OSS's calls, which are Qwen3-Coder's in another outer tag:

<seed:tool_call>
<function=name>
<parameter=key>value</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from . import qwen3_coder
from .guided import GuidedTags

TAGS: Final = replace(
    qwen3_coder.TAGS,
    open="<seed:tool_call>",
    close="</seed:tool_call>",
    other_opens=(qwen3_coder.TAGS.open,),
    ends=(*qwen3_coder.TAGS.ends, qwen3_coder.TAGS.close),
)
SYNTAX: Final = replace(qwen3_coder.SYNTAX, trims_pairs=True)
OWN_CALLS: Final = replace(
    qwen3_coder.OWN_CALLS,
    open=TAGS.open,
    close=TAGS.close,
    tags=GuidedTags("<parameter=", ">", "", "</parameter>", "\n"),
)
