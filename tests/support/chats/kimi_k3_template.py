"""A small chat template in the format of Kimi-K3's, written for the tests, and answers as it renders them."""

from __future__ import annotations

from typing import Any, Final

from moeserve.tokenizer.chat_template import ChatTemplate

KIMI_K3: Final = """{%- set thinking = thinking | default(true) %}
{%- set thinking_effort = thinking_effort | default('max') %}
{%- macro opened(tag) %}<|open|>{{ tag }}<|sep|>{% endmacro %}
{%- macro closed(tag) %}<|close|>{{ tag }}<|sep|>{% endmacro %}
{%- macro kind(value) -%}
{{ 'string' if value is string else 'boolean' if value is boolean else 'null' if value is none else 'number'
   if value is number else 'object' if value is mapping else 'array' }}
{%- endmacro %}
{%- if thinking and thinking_effort not in ['low', 'high', 'max'] %}{{ raise_exception('no such effort') }}{% endif %}
{%- if tools %}{{ opened('message role="system" type="tool-declare"') }}{{ tools | tojson }}{{ closed('message') -}}
<|end_of_msg|>{% endif %}
{%- if thinking %}{{ opened('message role="system" type="thinking-effort"') }}Effort: {{ thinking_effort }}.
{{- closed('message') }}<|end_of_msg|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ opened('message role="tool" tool="%s"' % m.name) }}{{ m.content }}
{%- elif m.role == 'assistant' %}{{ opened('message role="assistant"') }}
{%- if thinking %}{{ opened('think') }}{{ m.reasoning_content }}{{ closed('think') }}{% endif %}
{{- opened('response') }}{{ m.content }}{{ closed('response') }}
{%- if m.tool_calls %}{{ opened('tools') }}
{%- for call in m.tool_calls %}{{ opened('call tool="%s" index="%d"' % (call.function.name, loop.index)) }}
{%- for key, value in call.function.arguments | items %}
{{- opened('argument key="%s" type="%s"' % (key, kind(value))) }}{{ value if value is string else value | tojson }}
{{- closed('argument') }}
{%- endfor %}{{ closed('call') }}
{%- endfor %}{{ closed('tools') }}
{%- endif %}
{%- else %}{{ opened('message role="%s"' % m.role) }}{{ m.content }}
{%- endif %}{{ closed('message') }}<|end_of_msg|>
{%- endfor %}
{%- if add_generation_prompt %}{{ opened('message role="assistant"') }}{{ opened('think' if thinking else 'response') }}
{%- endif %}"""


def rendered_in_sections(thought: str, content: str, calls: list[tuple[str, Any]]) -> str:
    """Returns the same as Kimi-K3 writes it, with the reasoning `thought`, from the answer's first tag on."""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": thought,
        "tool_calls": [{"function": {"name": tool, "arguments": arguments}} for tool, arguments in calls],
    }
    text = ChatTemplate(KIMI_K3, {}).render([message], kwargs={"thinking": bool(thought)})
    return text.partition('<|open|>message role="assistant"<|sep|>')[2].partition("<|end_of_msg|>")[0]
