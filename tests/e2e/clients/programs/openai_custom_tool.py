"""OpenAI's Python client with a tool that takes free text: a whole answer, a streamed one, and the end."""

import sys
from types import SimpleNamespace

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[A-Z][a-z]+"}}
tools = [{"type": "custom", "custom": {"name": "weather", "description": "Of a city.", "format": grammar}}]
messages = [{"role": "user", "content": "What is the weather?"}]


def tell(call):
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "weather", "Paris")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})


message = client.chat.completions.create(model=sys.argv[2], messages=messages, tools=tools).choices[0].message
messages.append(message)
for call in message.tool_calls:
    tell(call)

calls = {}
for chunk in client.chat.completions.create(model=sys.argv[2], messages=messages, tools=tools, stream=True):
    for delta in chunk.choices[0].delta.tool_calls or []:
        written = delta.model_dump(exclude_none=True)
        call = calls.setdefault(delta.index, {"custom": {"input": ""}})
        call["custom"] |= {
            "input": call["custom"]["input"] + written["custom"].pop("input"),
            **written.pop("custom"),
        }
        call |= written
messages.append({"role": "assistant", "tool_calls": list(calls.values())})
for call in calls.values():
    tell(SimpleNamespace(id=call["id"], type=call["type"], custom=SimpleNamespace(**call["custom"])))

last = client.chat.completions.create(model=sys.argv[2], messages=messages, tools=tools)
print(last.choices[0].message.content)
