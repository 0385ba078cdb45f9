"""Ollama's Python client."""

import sys

from ollama import Client


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return "Rain."


client = Client(host=sys.argv[1])
assert client.list().models[0].model == sys.argv[2]
assert "tools" in client.show(sys.argv[2]).capabilities
messages = [{"role": "user", "content": "What is the weather?"}]
for turn in range(3):
    if turn == 1:
        content, thinking, calls = "", "", []
        for part in client.chat(sys.argv[2], messages=messages, tools=[weather], stream=True):
            content += part.message.content or ""
            thinking += part.message.thinking or ""
            calls += part.message.tool_calls or []
        messages.append({"role": "assistant", "content": content, "thinking": thinking, "tool_calls": calls})
    else:
        message = client.chat(
            sys.argv[2], messages=messages, tools=[weather], options={"num_ctx": 8192}
        ).message
        content, calls = message.content, message.tool_calls or []
        messages.append(message)
    for call in calls:
        result = weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
print(content)
