"""A small chat template in the format of Solar Open's, written for the tests, and answers as it renders them."""

from __future__ import annotations

from typing import Any, Final

from moeserve.chatformat.solar_open import CALLS
from moeserve.tokenizer.chat_template import ChatTemplate

SOLAR: Final = """{%- set reasoning_effort = reasoning_effort | default('high') %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|begin|>system<|content|>
{%- for tool in tools %}<|tool:begin|>{{ tool.function | tojson }}<|tool:end|>{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|begin|>tool<|tool_response|>{% endif -%}
<|tool_response:begin|>{{ m.tool_call_id + '<|tool_response:result|>' + m.content }}<|tool_response:end|>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|end|>{% endif %}
{%- else %}
{%- if m.role == 'assistant' and m.reasoning and loop.index0 > last.user -%}
<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}
{%- if m.tool_calls %}<|begin|>assistant<|tool_calls|>
{%- for call in m.tool_calls -%}
<|tool_call:begin|>{{ call.id + '<|tool_call:name|>' + call.function.name }}<|tool_call:args|>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
<|tool_call:end|>{% endfor %}<|calls|>
{%- else %}<|begin|>{{ m.role + '<|content|>' + m.content }}<|end|>{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{%- if reasoning_effort in ['low', 'minimal'] %}<|begin|>assistant<|think|><|end|>{% endif %}<|begin|>assistant
{%- endif %}"""


def rendered_in_messages(thought: str, content: str, calls: list[tuple[str, Any]]) -> str:
    """Returns an answer as Solar Open writes it, behind `<|begin|>assistant`, without the token that ends it."""
    messages: list[dict[str, Any]] = []
    if content or not calls:
        messages.append({"role": "assistant", "content": content})
    if calls:
        written = [
            {"id": f"call{at:06d}", "function": {"name": tool, "arguments": arguments}}
            for at, (tool, arguments) in enumerate(calls)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": written})
    messages[0]["reasoning"] = thought
    text = ChatTemplate(SOLAR, {}).render(messages, add_generation_prompt=False)
    return text.removeprefix("<|begin|>assistant").removesuffix(CALLS).removesuffix("<|end|>")
