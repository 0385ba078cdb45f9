"""OpenAI's Python client: responses, whose output goes back as it came, parsed and streamed."""

import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class weather(BaseModel):
    """The weather of a city."""

    city: str


client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
function = pydantic_function_tool(weather)["function"]
asked = {"model": sys.argv[2], "tools": [{"type": "function", **function}]}
items = [{"role": "user", "content": "What is the weather?"}]
for turn in range(3):
    if turn == 1:
        with client.responses.stream(input=items, **asked) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
    else:
        response = client.responses.parse(input=items, **asked)
    items += response.output
    for item in response.output:
        if item.type == "function_call":
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "Rain."})
print(response.output_text)
