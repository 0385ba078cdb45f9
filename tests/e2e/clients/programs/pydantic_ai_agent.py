"""Pydantic AI's agents, streamed, over OpenAI's chat API, OpenAI's responses and Anthropic's messages."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, name, kind = sys.argv[1:4]
if kind == "anthropic":
    model = AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))
else:
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    model = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind](name, provider=provider)
agent = Agent(model)


@agent.tool_plain
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


async def read(context, events):
    async for _ in events:
        pass


print(agent.run_sync("What is the weather?", event_stream_handler=read).output)
