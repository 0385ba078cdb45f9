"""Anthropic's Python client: its memory tool, whose type alone the API is told."""

import sys
from pathlib import Path

import anthropic
from anthropic.tools import BetaLocalFilesystemMemoryTool

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
runner = client.beta.messages.tool_runner(
    model=sys.argv[2],
    max_tokens=200,
    tools=[BetaLocalFilesystemMemoryTool(base_path="memory")],
    betas=["context-management-2025-06-27"],
    messages=[{"role": "user", "content": "Remember the weather."}],
)
last = runner.until_done()
assert Path("memory/memories/weather.txt").read_text() == "Rain."
print("".join(block.text for block in last.content if block.type == "text"))
