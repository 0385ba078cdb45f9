"""Inspect: an evaluation whose model has a tool, over three APIs."""

import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

url, name, kind = sys.argv[1:4]
api, base_url = {
    "chat": ("vllm", url + "/v1"),
    "responses": ("openai", url + "/v1"),
    "anthropic": ("anthropic", url),
}[kind]
further = {"responses_api": True} if kind == "responses" else {}
model = get_model(f"{api}/{name}", base_url=base_url, api_key="none", **further)


@tool
def weather():
    async def execute(city: str):
        """The weather of a city.

        Args:
            city: Its name.
        """
        assert city == "Paris"
        return "Rain."

    return execute


task = Task(
    dataset=[Sample("What is the weather?", target="Paris")],
    solver=[use_tools(weather()), generate()],
    scorer=includes(),
)
(log,) = eval(task, model=model, display="none", log_dir="logs")
assert log.status == "success", log.error
print(log.samples[0].output.completion)
