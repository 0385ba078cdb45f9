"""An answer with a thought, a text and two calls, cut into pieces, and what the three chat APIs are asked with."""

from __future__ import annotations

from typing import Any

from tests.support.servers.http_harness import NAME, HttpServer, tokens_of

MESSAGES: Any = [{"role": "user", "content": "Who jumps?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ANTHROPIC_TOOLS: Any = [
    {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]
RESPONSES_TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "Of a city.",
        "parameters": SCHEMA,
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]
ANSWER = (
    *("<think>", "\nLet me", " see.\n", "</think>", "\n\nHere", " you are.", "\n\n<tool", "_call>", "\n{"),
    *(
        '"name": "wea',
        'ther", "arg',
        'uments": {"ci',
        'ty": "Pa',
        'ris"}',
        "}\n</tool_call>",
        "\n<tool_call>\n",
    ),
    '{"name": "now", "arguments": {}}\n</tool_call>',
)
PARIS = {"city": "Paris"}
REASONING_TOKENS = 4


def ask(server: HttpServer, **fields: Any) -> dict[str, Any]:
    """A chat's answer; its request is the only one in `server.requests`."""
    server.requests.clear()
    response = server.post("/v1/chat/completions", {"model": NAME, "messages": MESSAGES} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def prompt_of(server: HttpServer) -> str:
    return server.tokenizer.decode(tokens_of(server.requests[-1]), skip_special=False)
