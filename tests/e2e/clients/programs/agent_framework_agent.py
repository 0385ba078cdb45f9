"""Microsoft's Agent Framework, streamed, over the chat API and over responses."""

import asyncio
import sys

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

url, name, kind = sys.argv[1:4]
made = {"chat": OpenAIChatCompletionClient, "responses": OpenAIChatClient}[kind]
client = made(model=name, base_url=url + "/v1", api_key="none")


@tool(approval_mode="never_require")
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


async def main():
    stream = Agent(client=client, tools=[weather]).run("What is the weather?", stream=True)
    async for _ in stream:
        pass
    print((await stream.get_final_response()).text)


asyncio.run(main())
