"""Conversations for chat templates."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "What is <b>12 + 30</b> & why? “ü”"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort> & 'Tag'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "no thinking": {"messages": [USER], "kwargs": {"enable_thinking": False}},
    "thinking": {"messages": [USER], "kwargs": {"enable_thinking": True}},
    "turns": {
        "messages": [USER, {"role": "assistant", "content": "42"}, {"role": "user", "content": "Sure?"}]
    },
    "reasoning, earlier turn": {
        "messages": [USER, {"role": "assistant", "content": "42", "reasoning_content": "\nadd\n"}, USER]
    },
    "reasoning, last turn": {
        "messages": [USER, {"role": "assistant", "content": "42", "reasoning_content": "\nadd\n"}],
        "add_generation_prompt": False,
    },
    "reasoning in the text": {
        "messages": [USER, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n42"}],
        "add_generation_prompt": False,
    },
    "tools": {"messages": [{"role": "system", "content": "Help."}, USER], "tools": TOOLS},
    "tool calls": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": '{"t": 21}'},
            {"role": "tool", "content": "<rain>"},
        ],
        "tools": TOOLS,
    },
    "arguments as text": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Bern"}'}}],
            },
        ]
    },
}
