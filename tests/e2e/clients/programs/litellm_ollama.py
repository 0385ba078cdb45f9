"""LiteLLM's two providers for Ollama: ollama_chat over three turns with tools, and ollama, which asks /api/generate."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one at its import
import litellm

url, model, provider = sys.argv[1:]
tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather?"}]


def ask(stream: bool, **more: object) -> object:
    answer = litellm.completion(
        model=f"{provider}/{model}", api_base=url, messages=messages, stream=stream, num_retries=0, **more
    )
    return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer


if provider == "ollama":
    for stream in (False, True):
        message = ask(stream).choices[0].message
else:
    for turn in range(3):
        message = ask(turn == 1, tools=tools).choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or []:
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
print(message.content)
