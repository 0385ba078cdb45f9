"""Calls that are a list of JSON objects in a tag, as Granite 3 and Hunyuan write them:

<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]

<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>

And Llama 3's and 4's, which have no tag, or one in place of a list:

{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls
from .mistral import list_of_one
from .tool_calls import CallTags

_ENDS: Final = ("]", "}")

GRANITE: Final = CallTags("<|tool_call|>", "", following=",", ends=_ENDS)
GRANITE_GUIDED: Final = list_of_one(GRANITE.open)

HUNYUAN: Final = CallTags("<tool_calls>", "</tool_calls>", following=",", ends=_ENDS)
HUNYUAN_GUIDED: Final = list_of_one(HUNYUAN.open, HUNYUAN.close)

# `bare` is the usual beginning of a call; JSON that is no call stays text.
LLAMA: Final = CallTags("<|python_tag|>", "", bare='{"name"', following=";", ends=_ENDS)
LLAMA_MARK: Final = '{"name": function name, "parameters"'  # what its templates say
LLAMA_GUIDED: Final = GuidedCalls('{"name": "', "", '", "parameters": ', "}", "", "; ", is_block=False)
