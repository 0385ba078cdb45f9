"""Google's Agent Development Kit over litellm, streamed."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one at its import
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

url, name = sys.argv[1:3]
model = LiteLlm(model=f"hosted_vllm/{name}", api_base=url + "/v1", api_key="none")


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


async def main():
    runner = InMemoryRunner(agent=LlmAgent(name="a", model=model, tools=[weather]), app_name="a")
    session = await runner.session_service.create_session(app_name="a", user_id="me")
    asked = types.Content(role="user", parts=[types.Part(text="What is the weather?")])
    config = RunConfig(streaming_mode=StreamingMode.SSE)
    async for event in runner.run_async(
        user_id="me", session_id=session.id, new_message=asked, run_config=config
    ):
        if event.is_final_response() and not event.partial:
            print("".join(part.text or "" for part in event.content.parts))


asyncio.run(main())
