"""litellm: chat completions, its own message objects appended as they came."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one at its import
import litellm

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
for turn in range(3):
    answer = litellm.completion(
        model=f"hosted_vllm/{sys.argv[2]}",
        api_base=sys.argv[1] + "/v1",
        api_key="none",
        messages=messages,
        tools=tools,
        stream=turn == 1,
        num_retries=0,
    )
    if turn == 1:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message if turn else message.model_dump())
    for call in message.tool_calls or []:
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
print(message.content)
