"""The program llm with its plugin llm-ollama: a chain of tool calls, and an object of a schema."""

import os
import sys

os.environ["OLLAMA_HOST"] = sys.argv[1]
import llm


def weather(city: str) -> str:
    """The weather of a city."""
    return "Rain."


model = llm.get_model(f"ollama/{sys.argv[2]}")
if sys.argv[3] == "object":
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    print(model.prompt("Name a city.", schema=schema, stream=False).text())
else:
    print(model.conversation(tools=[weather]).chain("What is the weather?", stream=True).text())
