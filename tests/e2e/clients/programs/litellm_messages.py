"""litellm: Anthropic's messages, through its own translation."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one at its import
import litellm

tool = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
messages = [{"role": "user", "content": "What is the weather?"}]
for _ in range(3):
    answer = litellm.completion(
        model=f"anthropic/{sys.argv[2]}",
        api_base=sys.argv[1],
        api_key="none",
        messages=messages,
        tools=[tool],
        max_tokens=100,
        num_retries=0,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
print(message.content)
