"""LlamaIndex's Ollama: three turns with a tool, one of them streamed; and an object of a schema."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel

url, model, what = sys.argv[1:]
llm = Ollama(model=model, base_url=url, request_timeout=60, context_window=8192, thinking=False)


class City(BaseModel):
    name: str


def weather(city: str) -> str:
    """The weather of a city."""
    return "Rain."


if what == "object":
    found = llm.as_structured_llm(City).complete("Name a city.")
    print(found.raw.name)
else:
    tool = FunctionTool.from_defaults(fn=weather)
    messages = [ChatMessage(role="user", content="What is the weather?")]
    for turn in range(3):
        if turn == 1:
            *_, answer = llm.stream_chat_with_tools([tool], chat_history=messages)
        else:
            answer = llm.chat_with_tools([tool], chat_history=messages)
        messages.append(answer.message)
        for call in llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
            result = weather(**call.tool_kwargs)
            more = {"tool_call_id": call.tool_id, "name": call.tool_name}
            messages.append(ChatMessage(role="tool", content=result, additional_kwargs=more))
    print(answer.message.content)
