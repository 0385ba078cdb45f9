"""Anthropic's library: a picture in a message, or in a tool's result, as agents send screenshots."""

import base64
import sys
from pathlib import Path

from anthropic import Anthropic

url, name, kind = sys.argv[1:4]
client = Anthropic(base_url=url, api_key="none", max_retries=0)
data = base64.b64encode(Path("sign.png").read_bytes()).decode()
picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
question = {"type": "text", "text": "What does it say?"}
if kind == "message":
    messages = [{"role": "user", "content": [picture, question]}]
else:
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, question]},
    ]
tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
counted = client.messages.count_tokens(model=name, messages=messages, tools=tools)
answer = client.messages.create(model=name, max_tokens=100, messages=messages, tools=tools)
assert counted.input_tokens == answer.usage.input_tokens
print("".join(block.text for block in answer.content if block.type == "text"))
