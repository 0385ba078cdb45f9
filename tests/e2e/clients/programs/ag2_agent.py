"""AG2's agents over the chat API, streamed, and over responses."""

import asyncio
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig, OpenAIResponsesConfig

url, name, kind = sys.argv[1:4]
made = {"chat": OpenAIConfig, "responses": OpenAIResponsesConfig}[kind]
config = made(model=name, base_url=url + "/v1", api_key="none", max_retries=0, streaming=kind == "chat")


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


print(asyncio.run(Agent("a", config=config, tools=[weather]).ask("What is the weather?")).body)
