"""Haystack's agents, streamed, over the chat API and over responses."""

import os
import sys
from typing import Annotated

os.environ |= {"OPENAI_API_KEY": "none", "HAYSTACK_TELEMETRY_ENABLED": "False"}
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool

url, name, kind = sys.argv[1:4]
generator = {"chat": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}[kind]


@tool
def weather(city: Annotated[str, "Its name"]) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


agent = Agent(
    chat_generator=generator(model=name, api_base_url=url + "/v1", max_retries=0),
    tools=[weather],
    streaming_callback=lambda chunk: None,
)
print(agent.run(messages=[ChatMessage.from_user("What is the weather?")])["messages"][-1].text)
