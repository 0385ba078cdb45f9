"""Agno's agents, streamed, over three APIs."""

import sys

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIResponses
from agno.models.vllm import VLLM

url, name, kind = sys.argv[1:4]
match kind:
    case "anthropic":
        model = Claude(id=name, api_key="none", client_params={"base_url": url})
    case "responses":
        model = OpenAIResponses(id=name, api_key="none", base_url=url + "/v1")
    case _:
        model = VLLM(id=name, api_key="none", base_url=url + "/v1")


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


agent = Agent(model=model, tools=[weather], telemetry=False)
print("".join(getattr(event, "content", None) or "" for event in agent.run("What is it?", stream=True)))
