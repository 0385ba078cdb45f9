"""OpenAI's Python client: create, parse and stream in turn, each answer appended as it came."""

import json
import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class weather(BaseModel):
    """The weather of a city."""

    city: str


client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
messages = [{"role": "user", "content": "What is the weather?"}]
tools = [{"type": "function", "function": {"name": "weather", "parameters": weather.model_json_schema()}}]
strict = [pydantic_function_tool(weather)]

first = client.chat.completions.parse(model=sys.argv[2], messages=messages, tools=strict, verbosity="low")
message = first.choices[0].message
messages.append(message)
for call in message.tool_calls:
    assert call.function.parsed_arguments == weather(city="Paris")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
with client.chat.completions.stream(model=sys.argv[2], messages=messages, tools=strict) as stream:
    message = stream.get_final_completion().choices[0].message
messages.append(message.model_dump())
for call in message.tool_calls:
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
last = client.chat.completions.create(model=sys.argv[2], messages=messages, tools=tools)
print(last.choices[0].message.content)
