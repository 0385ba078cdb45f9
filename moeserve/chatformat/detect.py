"""Which format a model writes, read from its chat template: the template shows it to the model."""

from __future__ import annotations

from typing import Literal

from . import qwen3_coder, reasoning, tool_calls

ToolFormat = Literal["hermes", "qwen3_coder"]


def tool_format(template: str) -> ToolFormat | None:
    """None where the template knows no calls that can be read."""
    if qwen3_coder.FUNCTION in template:
        return "qwen3_coder"
    return "hermes" if tool_calls.OPEN in template else None


def thinks(template: str) -> bool:
    """Whether answers may begin with a thought."""
    return reasoning.CLOSE in template
