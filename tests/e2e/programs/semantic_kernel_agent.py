"""Semantic Kernel's agents, streamed. Its function is called tools-weather."""

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

url, name = sys.argv[1:3]
client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


class tools:
    @kernel_function(description="The weather of a city.")
    def weather(self, city: str) -> str:
        assert city == "Paris"
        return "Rain."


async def main():
    service = OpenAIChatCompletion(ai_model_id=name, async_client=client)
    agent = ChatCompletionAgent(service=service, name="a", plugins=[tools()])
    print("".join([str(part) async for part in agent.invoke_stream("What is the weather?")]))


asyncio.run(main())
