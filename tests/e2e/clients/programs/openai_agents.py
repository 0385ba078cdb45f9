"""OpenAI's Agents SDK, streamed, over the chat API and over responses."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url, name, kind = sys.argv[1:4]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[kind](name, client)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


async def main():
    result = Runner.run_streamed(Agent("a", tools=[weather], model=model), "What is the weather?")
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
