"""Claude's Agent SDK: a session of two questions, with a tool of this program's."""

import asyncio
import sys

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    create_sdk_mcp_server,
    tool,
)

url, name = sys.argv[1:3]


@tool("weather", "The weather of a city.", {"city": str})
async def weather(arguments):
    assert arguments == {"city": "Paris"}
    return {"content": [{"type": "text", "text": "Rain."}]}


options = ClaudeAgentOptions(
    model=name,
    mcp_servers={"w": create_sdk_mcp_server("w", tools=[weather])},
    allowed_tools=["mcp__w__weather"],
    include_partial_messages=True,
    setting_sources=[],
    env={
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "false",  # all tools in the prompt
    },
)


async def main():
    async with ClaudeSDKClient(options) as client:
        for question in ("What is the weather?", "And tomorrow?"):
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    print(message.subtype, message.result)


asyncio.run(main())
