"""Calls as a list of JSON objects in a tag, which Granite 3, Phi-4-mini, Hunyuan and Nemotron Nano 2 write:

<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]

<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>

<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>

<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>

Llama 3 and 4 write calls without a tag, or after an opening tag that has no closing tag:

{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls
from .mistral import list_of_one
from .tool_calls import CallTags

_ENDS: Final = ("]", "}", "```")

GRANITE: Final = CallTags("<|tool_call|>", "", following=",", other_following="{", ends=_ENDS)
GRANITE_GUIDED: Final = list_of_one(GRANITE.open)

# Its template shows no calls, but the tools in a tag of the same form.
PHI4_MARKS: Final = ("<|tool|>", "<|/tool|>")
PHI4: Final = CallTags("<|tool_call|>", "<|/tool_call|>", following=",", other_following="{", ends=_ENDS)
PHI4_GUIDED: Final = list_of_one(PHI4.open, PHI4.close)

HUNYUAN: Final = CallTags("<tool_calls>", "</tool_calls>", following=",", other_following="{", ends=_ENDS)
HUNYUAN_GUIDED: Final = list_of_one(HUNYUAN.open, HUNYUAN.close)

NEMOTRON: Final = CallTags("<TOOLCALL>", "</TOOLCALL>", following=",", other_following="{", ends=_ENDS)
NEMOTRON_GUIDED: Final = list_of_one(NEMOTRON.open, NEMOTRON.close)

# `bare`: the usual beginning of a call without a tag. JSON that is not a call stays text.
LLAMA: Final = CallTags("<|python_tag|>", "", bare='{"name"', following=";", ends=_ENDS)
LLAMA_MARK: Final = '{"name": function name, "parameters"'  # a text in its templates
LLAMA_GUIDED: Final = GuidedCalls('{"name": "', "", '", "parameters": ', "}", "", "; ", is_block=False)
