"""LangChain's agents (LangGraph), streamed, over three APIs."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, name, kind = sys.argv[1:4]
if kind == "anthropic":
    model = ChatAnthropic(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=100)
else:
    model = ChatOpenAI(
        model=name,
        base_url=url + "/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=kind == "responses",
    )


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


asked = {"messages": [{"role": "user", "content": "What is the weather?"}]}
for mode, state in create_agent(model, tools=[weather]).stream(asked, stream_mode=["messages", "values"]):
    if mode == "values":
        last = state["messages"][-1]
print(last.text)
