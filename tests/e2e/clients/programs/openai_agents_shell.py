"""OpenAI's Agents SDK with its shell and its editor, which the API knows by their types alone."""

import asyncio
import subprocess
import sys
from pathlib import Path

from agents import (
    Agent,
    ApplyPatchTool,
    OpenAIResponsesModel,
    Runner,
    ShellTool,
    apply_diff,
    set_tracing_disabled,
)
from agents.editor import ApplyPatchResult
from openai import AsyncOpenAI

url, name = sys.argv[1:3]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def execute(request):
    done = [
        subprocess.run(command, shell=True, capture_output=True, text=True)
        for command in request.data.action.commands
    ]
    return "".join(one.stdout for one in done)


class Editor:
    def create_file(self, operation):
        Path(operation.path).write_text(apply_diff("", operation.diff, mode="create"))
        return ApplyPatchResult(status="completed", output="Created.")

    def update_file(self, operation):
        raise NotImplementedError

    def delete_file(self, operation):
        raise NotImplementedError


async def main():
    tools = [ShellTool(executor=execute), ApplyPatchTool(editor=Editor())]
    agent = Agent("a", tools=tools, model=OpenAIResponsesModel(name, client))
    result = Runner.run_streamed(agent, "What is the weather?")
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
