"""LangChain with OpenAI's chat API, with OpenAI's responses and with Anthropic's messages."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "Rain."


url, name, kind = sys.argv[1:4]
if kind == "anthropic":
    model = ChatAnthropic(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=100)
else:
    responses = kind == "responses"
    model = ChatOpenAI(
        model=name,
        base_url=url + "/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=responses,
        verbosity="low",
    )
bound = model.bind_tools([weather])
messages = [HumanMessage("What is the weather?")]
for turn in range(3):
    if turn == 1:
        answer = None
        for chunk in bound.stream(messages):
            answer = chunk if answer is None else answer + chunk
    else:
        answer = bound.invoke(messages)
    messages.append(answer)
    for call in answer.tool_calls:
        assert call["args"] == {"city": "Paris"}
        messages.append(ToolMessage("Rain.", tool_call_id=call["id"]))
print(answer.text if isinstance(answer.text, str) else answer.text())
