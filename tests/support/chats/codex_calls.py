"""Tools that Codex declares, with calls of them and the outputs that it sends back."""

from __future__ import annotations

from typing import Any

OBJECT: Any = {"type": "object", "properties": {}}
CODEX_TOOLS: Any = [
    {"type": "function", "name": "exec", "parameters": OBJECT, "strict": False},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Sub-agents.",
        "tools": [
            {"type": "function", "name": "spawn", "parameters": OBJECT, "strict": False},
            {"type": "function", "name": "exec", "parameters": OBJECT, "strict": False},
        ],
    },
    {
        "type": "custom",
        "name": "patch",
        "description": "Edits.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: BEGIN"},
    },
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation"},
]
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("exec", {"cmd": "ls"}, {"type": "function_call", "name": "exec", "arguments": '{"cmd": "ls"}'}),
    ("spawn", {}, {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": "{}"}),
    ("agents.exec", {}, {"type": "function_call", "name": "exec", "namespace": "agents", "arguments": "{}"}),
    (
        "patch",
        {"input": "*** Begin\n"},
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n"},
    ),
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5},
        },
    ),
    (
        "shell",
        {"commands": ["ls", "false"], "timeout_ms": 5},
        {"type": "shell_call", "action": {"commands": ["ls", "false"], "timeout_ms": 5}},
    ),
    (
        "apply_patch",
        {"type": "create_file", "path": "a", "diff": "+Hi"},
        {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "+Hi"}},
    ),
]

# What the client sends of a call's outcome, and how the model reads it.
PRINTED: Any = [
    {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "", "stderr": "no\n", "outcome": {"type": "exit", "exit_code": 1}},
    {"stdout": "b", "stderr": "", "outcome": {"type": "timeout"}},
]
OUTPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "shell": ({"output": PRINTED, "max_output_length": 9}, "a\nno\nexit code 1\nb\ntimed out"),
    "apply_patch": ({"output": "no such line", "status": "failed"}, "The patch failed.\nno such line"),
}
