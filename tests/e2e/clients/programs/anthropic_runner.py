"""Anthropic's Python client: its tool runner."""

import sys

import anthropic


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
runner = client.beta.messages.tool_runner(
    model=sys.argv[2],
    max_tokens=200,
    tools=[weather],
    messages=[{"role": "user", "content": "What is the weather?"}],
)
print("".join(block.text for block in runner.until_done().content if block.type == "text"))
