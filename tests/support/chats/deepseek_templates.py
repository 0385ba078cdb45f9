"""Chat templates in the form of DeepSeek's, from V3 to V4."""

from __future__ import annotations

from typing import Final

TOOLS = "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"


def _deepseek(call: str, separator: str, end: str) -> str:
    return (
        "<｜begin▁of▁sentence｜>"
        + TOOLS
        + """{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- if m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<｜Assistant｜>' + (m.content or '') }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + """
        + call
        + """ + '<｜tool▁call▁end｜>' }}
{%- if not loop.last %}{{ '"""
        + separator
        + """' }}{% endif %}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}{{ '<｜Assistant｜>"""
        + end
        + "' }}"
    )


DEEPSEEK_V3: Final = _deepseek(
    "call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```'",
    "\\n",
    "<think>\\n",  # R1's
)


DEEPSEEK_V31: Final = _deepseek(
    "call.function.name + '<｜tool▁sep｜>' + call.function.arguments", "", "</think>"
)


def _dsml(block: str) -> str:
    return (
        "{%- set mark = '｜DSML｜' %}<｜begin▁of▁sentence｜>"
        + TOOLS
        + """{%- for m in messages %}
{%- if m.role == 'assistant' %}<｜Assistant｜>
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}
{%- if m.tool_calls %}{{ '\n\n<' + mark + 'BLOCK>\n' }}
{%- for call in m.tool_calls %}{{ '<' + mark + 'invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<' + mark + 'parameter name="' + key + '" string="' }}{{ 'true' if value is string else 'false' }}{{ '">' }}
{{- value if value is string else value | tojson }}{{ '</' + mark + 'parameter>\n' }}
{%- endfor %}{{ '</' + mark + 'invoke>\n' }}{% endfor %}{{ '</' + mark + 'BLOCK>' }}{% endif %}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}{{ '<｜User｜><tool_result>' + m.content + '</tool_result>' }}
{%- else %}{{ ('<｜User｜>' if m.role == 'user' else '') + m.content }}{% endif %}
{%- endfor %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}""".replace("BLOCK", block)
    )


DEEPSEEK_V32: Final = _dsml("function_calls")


DEEPSEEK_V4: Final = _dsml("tool_calls")
