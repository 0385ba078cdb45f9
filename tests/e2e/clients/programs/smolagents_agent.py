"""smolagents' agent with tools: each turn must call one, and a tool of its own gives the answer."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    assert city == "Paris"
    return "Rain."


model = OpenAIModel(model_id=sys.argv[2], api_base=sys.argv[1] + "/v1", api_key="none")
agent = ToolCallingAgent(tools=[weather], model=model, stream_outputs=True)
print(agent.run("What is the weather?"))
