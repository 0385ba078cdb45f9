"""Anthropic's Python client with context edits: only the last result stays in the prompt."""

import sys

from anthropic import Anthropic

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
edit = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 1},
    "keep": {"type": "tool_uses", "value": 1},
}
asked = {
    "model": sys.argv[2],
    "max_tokens": 200,
    "betas": ["context-management-2025-06-27"],
    "tools": [{"name": "weather", "input_schema": schema}],
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "context_management": {"edits": [edit]},
}
for _ in range(3):
    with client.beta.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    asked["messages"].append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "Rain. " * 40} for use in uses]
    if results:
        asked["messages"].append({"role": "user", "content": results})
(applied,) = message.context_management.applied_edits
assert applied.cleared_tool_uses == 1
counted = client.beta.messages.count_tokens(
    **{name: asked[name] for name in ("model", "betas", "tools", "context_management")},
    messages=asked["messages"][:-1],
)
assert counted.context_management.original_input_tokens == counted.input_tokens + applied.cleared_input_tokens
print(message.content[-1].text)
