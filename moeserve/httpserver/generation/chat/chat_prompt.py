"""A conversation as the chat template writes it, and as token ids."""

from __future__ import annotations

from typing import Any, Final

from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.chat.thinking_tokens import template_effort
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.transport.errors import invalid

_SWITCHES: Final = ("enable_thinking", "thinking")  # templates' variables; the second one is DeepSeek's


async def encode(text: ModelText, limit: int, asked: Asked, prompt: ChatPrompt) -> list[int]:
    """Returns the conversation as token ids, at most about `limit` of them. Raises ApiError 400."""
    return await text.encode_chat(await render(text, limit, asked, prompt))


async def render(text: ModelText, limit: int, asked: Asked, prompt: ChatPrompt) -> list[str]:
    """Returns the conversation as the chat template writes it: see `ModelText.render_chat`. Raises ApiError 400."""
    tools = prompt.tools
    if tools.may_call and not text.formats.calls_tools:
        message = "this model's chat template shows no way to call tools (see --tool-call-parser)"
        raise invalid(tools.param, message)
    return await text.render_chat(
        list(prompt.messages),
        tools=[tool.for_template() for tool in tools.tools] or None,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        kwargs=_template_kwargs(prompt, text.formats),
        limit=limit,
        tenant=asked.caller.tenant,
        param=asked.prompt_param,
    )


def _template_kwargs(prompt: ChatPrompt, formats: ChatFormats) -> dict[str, Any]:
    kwargs = dict(prompt.template_kwargs)
    if formats.channels is not None:
        effort = template_effort(prompt.thinking)
        return kwargs if effort is None else {"reasoning_effort": effort} | kwargs
    if prompt.thinking.is_enabled is not None:
        kwargs |= dict.fromkeys(_SWITCHES, prompt.thinking.is_enabled)
    return kwargs
