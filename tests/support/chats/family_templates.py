"""Small chat templates in the formats of published models, written for the tests, by the name of the format.

Each shows the tools in the prompt, renders an assistant's calls as its family's template does, and ends where the
answer begins.
"""

from __future__ import annotations

import json
from typing import Any, Final

from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.httpserver.generation.chat.template_input import for_deepseek
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.support.chats.deepseek_templates import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32
from tests.support.chats.deepseek_templates import TOOLS as _TOOLS

_VALUE = "{{ value if value is string else value | tojson }}"

HERMES: Final = (
    _TOOLS
    + """{% for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
)

QWEN3_CODER: Final = (
    _TOOLS
    + """{% for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items -%}
<parameter={{ key }}>
"""
    + _VALUE
    + """
</parameter>
{% endfor -%}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
)

# Values that are no text are shown as Python writes them.
SEED_OSS: Final = """{%- set call_begin, call_end = '<seed:tool_call>', '</seed:tool_call>' %}
{%- set think_begin, think_end = '<seed:think>', '</seed:think>' %}
{%- for tool in tools or [] %}
def {{ tool.function.name }}{% endfor %}
{%- for m in messages %}{{ '<seed:bos>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ think_begin + m.reasoning_content + think_end + '\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '\n' + call_begin + '\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>' }}
{{- (value if value is string else value | string) + '</parameter>\n' }}
{%- endfor %}{{ '</function>\n' + call_end }}
{%- endfor %}<seed:eos>
{%- endfor %}<seed:bos>assistant
{%- if thinking_budget is defined and thinking_budget == 0 %}{{ think_begin + think_end }}{% endif %}
"""

# Arguments are tags in tags; null is left out.
MINIMAX_M3: Final = (
    "{%- set mark = ']<]minimax[>[' %}"
    + _TOOLS
    + """{%- macro tags(value) -%}
{%- if value is mapping -%}
{%- for key, inner in value.items() if inner is not none -%}
{{ mark }}<{{ key }}>{{ tags(inner) }}{{ mark }}</{{ key }}>
{%- endfor -%}
{%- elif value is iterable and value is not string -%}
{%- for inner in value -%}{{ mark }}<item>{{ tags(inner) }}{{ mark }}</item>{%- endfor -%}
{%- elif value is boolean -%}{{ value | tojson }}
{%- elif value is not none -%}{{ value }}
{%- endif -%}
{%- endmacro -%}
{% for m in messages -%}
]~b]{{ 'ai' if m.role == 'assistant' else m.role }}
{{ m.content }}
{%- if m.tool_calls %}{{ mark }}<tool_call>
{% for call in m.tool_calls -%}
{{ mark }}<invoke name="{{ call.function.name }}">{{ tags(call.function.arguments) }}{{ mark }}</invoke>
{% endfor -%}
{{ mark }}</tool_call>
{%- endif %}[e~[
{% endfor -%}]~b]ai
{% if thinking_mode is defined and thinking_mode == 'disabled' %}{{ '</mm:think>' }}{% endif %}"""
)

GLM: Final = (
    "[gMASK]<sop>"
    + _TOOLS
    + """{% for m in messages -%}
<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items -%}
<arg_key>{{ key }}</arg_key>
<arg_value>"""
    + _VALUE
    + """</arg_value>
{% endfor -%}
</tool_call>
{%- endfor %}
{%- endfor %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}
<think></think>
{%- endif %}"""
)

MINIMAX: Final = (
    _TOOLS
    + """{% for m in messages -%}
]~b]{{ 'ai' if m.role == 'assistant' else m.role }}
{{ m.content }}
{%- if m.tool_calls %}
<minimax:tool_call>
{% for call in m.tool_calls -%}
<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items -%}
<parameter name="{{ key }}">"""
    + _VALUE
    + """</parameter>
{% endfor -%}
</invoke>
{% endfor -%}
</minimax:tool_call>
{%- endif %}[e~[
{% endfor %}]~b]ai
<think>
"""
)


GEMMA: Final = """<bos>
{%- macro shown(value) -%}
{%- if value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is none or value is boolean or value is number -%}{{ value | tojson }}
{%- elif value is mapping -%}
{ {%- for k, v in value | items %}{{ k }}:{{ shown(v) }}{{ ',' if not loop.last }}{% endfor -%} }
{%- else -%}[{% for v in value %}{{ shown(v) }}{{ ',' if not loop.last }}{% endfor %}]
{%- endif -%}
{%- endmacro -%}
{%- if tools %}<|turn>system
{% for tool in tools %}<|tool>declaration:{{ tool.function.name }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for m in messages -%}
<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{{ shown(call.function.arguments) }}<tool_call|>
{%- endfor %}<turn|>
{% endfor %}<|turn>model
"""

HARMONY: Final = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}// {{ tool.function.description + '\\n' }}type {{ tool.function.name }}
{% endfor %}<|end|>
{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{%- if not (loop.last and not add_generation_prompt) %}<|end|>{% endif %}
{%- elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

KIMI: Final = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    + """{%- for m in messages %}
{{- '<|im_assistant|>' if m.role == 'assistant' else '<|im_user|>' if m.role == 'user' else '<|im_system|>' }}
{{- m.role }}<|im_middle|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id or 'functions.' + call.function.name + ':0' }}
{{- '<|tool_call_argument_begin|>' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- endfor %}<|im_assistant|>assistant<|im_middle|>"""
)

_JSON_CALL = (
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
)
_LISTED = """[{%- for call in m.tool_calls %}""" + _JSON_CALL + """{{ ', ' if not loop.last }}{% endfor %}]"""
MISTRAL_JSON: Final = (
    "<s>[AVAILABLE_TOOLS]{{ tools | tojson if tools else '' }}[/AVAILABLE_TOOLS]"
    + """{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}
{%- if m.tool_calls %}[TOOL_CALLS]"""
    + _LISTED
    + """{% endif %}</s>
{%- endif %}
{%- endfor %}"""
)
MISTRAL: Final = MISTRAL_JSON.replace(
    "[TOOL_CALLS]" + _LISTED,
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}",
)
_ROLES = """{% for m in messages -%}
<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}
{%- if m.tool_calls %}CALLS{% endif %}<|end_of_text|>
{% endfor %}<|start_of_role|>assistant<|end_of_role|>"""
GRANITE: Final = _TOOLS + _ROLES.replace("CALLS", "<|tool_call|>" + _LISTED)
# Published without the calls, which the server writes as text.
PHI4_MINI: Final = """{%- for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}
{%- if m.role == 'system' and m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}
{%- if m.tool_calls %}CALLS{% endif %}<|end|>
{%- endfor %}<|assistant|>""".replace("CALLS", "<|tool_call|>" + _LISTED + "<|/tool_call|>")
HUNYUAN: Final = _TOOLS + _ROLES.replace("CALLS", "\n<tool_calls>" + _LISTED + "</tool_calls>")
NEMOTRON: Final = _TOOLS + _ROLES.replace("CALLS", "\n<TOOLCALL>" + _LISTED + "</TOOLCALL>")
LLAMA: Final = (
    """{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
"""
    + _TOOLS
    + "{% endif %}"
    + _ROLES.replace(
        "CALLS",
        """{% for call in m.tool_calls %}"""
        + _JSON_CALL.replace('arguments"', 'parameters"')
        + """{{ '; ' if not loop.last }}{% endfor %}""",
    )
)

HY_V3: Final = (
    "{%- set HYTK = ':opensource' %}"
    + _TOOLS
    + """{%- set separator = '<tool_sep{}>'.format(HYTK) %}
{%- for m in messages %}<|hy_{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}{{ '<tool_calls{}>'.format(HYTK) }}
{% for call in m.tool_calls -%}
{{ '<tool_call{}>'.format(HYTK) + call.function.name + separator }}
{% for key, value in call.function.arguments | items -%}
{{ '<arg_key{}>'.format(HYTK) + key + '</arg_key{}>'.format(HYTK) }}
{{ '<arg_value{}>'.format(HYTK) }}"""
    + _VALUE
    + """{{ '</arg_value{}>'.format(HYTK) }}
{% endfor -%}
{{ '</tool_call{}>'.format(HYTK) }}
{% endfor -%}
{{ '</tool_calls{}>'.format(HYTK) }}
{%- endif %}<|hy_eos|>
{%- endfor %}<|hy_assistant|>"""
)
HY_V3_PREVIEW: Final = (
    HY_V3.replace("{%- set HYTK = ':opensource' %}", "")
    .replace("'<tool_sep{}>'.format(HYTK)", "'<tool_sep>'")
    .replace("{}>'.format(HYTK)", ">'")
)

LFM2: Final = """{% if tools %}List of tools: {{ tools | tojson }}
{% endif %}{% for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}<|tool_call_start|>[
{%- for call in m.tool_calls -%}
{{ call.function.name }}(
{%- for key, value in call.function.arguments | items -%}
{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}
{%- endfor -%}
){{ ', ' if not loop.last }}
{%- endfor -%}
]<|tool_call_end|>
{%- endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


COHERE: Final = (
    "<BOS_TOKEN>"
    + _TOOLS
    + """{%- set reasoning = reasoning if reasoning is defined else true %}
{%- for m in messages %}<|START_OF_TURN_TOKEN|>
{%- if m.role == 'assistant' %}<|CHATBOT_TOKEN|>
{%- if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}
{%- if m.content %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% endif %}
{%- if m.tool_calls %}<|START_ACTION|>[
{%- for call in m.tool_calls %}
    {"tool_call_id": "{{ call.id }}", "tool_name": {{ call.function.name | tojson }}
{{- ', "parameters": ' }}{{ call.function.arguments | tojson }}}
{%- if not loop.last %},{% endif %}{% endfor %}
]<|END_ACTION|>{% endif %}
{%- elif m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[
    {"tool_call_id": "{{ m.tool_call_id }}", "results": {"0": {{ m.content | tojson }}}}
]<|END_TOOL_RESULT|>
{%- else %}{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>' }}{{ m.content }}
{%- endif %}<|END_OF_TURN_TOKEN|>
{%- endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>
{%- if not reasoning %}<|END_THINKING|>{% endif %}"""
)

TEMPLATES: Final = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM,
    "minimax_m2": MINIMAX,
    "minimax_m3": MINIMAX_M3,
    "gemma4": GEMMA,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "cohere": COHERE,
    "kimi_k2": KIMI,
    "mistral": MISTRAL,
    "mistral_json": MISTRAL_JSON,
    "granite": GRANITE,
    "phi4_mini": PHI4_MINI,
    "seed_oss": SEED_OSS,
    "hunyuan": HUNYUAN,
    "nemotron": NEMOTRON,
    "llama": LLAMA,
    "hy_v3": HY_V3,
    "hy_v3_preview": HY_V3_PREVIEW,
    "lfm2": LFM2,
}
_UNSHOWN: Final = ("<|START_TEXT|>", "<|END_TEXT|>")  # control tokens, which an answer's text lacks
_AROUND: Final = {  # an assistant's message
    **dict.fromkeys(("minimax_m2", "minimax_m3"), ("]~b]ai\n", "[e~[")),
    "glm45": ("<|assistant|>\n", "<|assistant|>"),
    "gemma4": ("<|turn>model\n", "<turn|>"),
    "deepseek_v3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    **dict.fromkeys(
        ("deepseek_v31", "deepseek_v32", "deepseek_v4"), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
    ),
    "phi4_mini": ("<|assistant|>", "<|end|>"),
    "seed_oss": ("<seed:bos>assistant\n", "<seed:eos>"),
    "cohere": ("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "kimi_k2": ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    "mistral": ("[/AVAILABLE_TOOLS]", "</s>"),
    "mistral_json": ("[/AVAILABLE_TOOLS]", "</s>"),
    **dict.fromkeys(("hy_v3", "hy_v3_preview"), ("<|hy_assistant|>", "<|hy_eos|>")),
    **dict.fromkeys(("granite", "hunyuan", "nemotron", "llama"), ("<|end_of_role|>", "<|end_of_text|>")),
}


def kept(name: str, calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the calls as the format can say them: MiniMax-M3's has no null."""
    return [(tool, _without_null(arguments)) for tool, arguments in calls] if name == "minimax_m3" else calls


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return ["" if inner is None else _without_null(inner) for inner in value]
    return value


def rendered(name: str, content: str, calls: list[tuple[str, Any]]) -> str:
    """Returns an assistant's message with these calls, names and arguments, as the format's template writes it."""
    functions = [{"name": tool, "arguments": arguments} for tool, arguments in calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }
    template = TEMPLATES[name]
    messages = for_deepseek([message], template) if TOOL_FORMATS[name].takes_text_arguments else [message]
    text = ChatTemplate(template, {}).render(messages)
    begin, end = _AROUND.get(name, ("assistant\n", "<|im_end|>"))
    for token in _UNSHOWN:
        text = text.replace(token, "")
    return text.partition(begin)[2].partition(end)[0]


def rendered_in_channels(content: str, calls: list[tuple[str, Any]]) -> str:
    """Returns the same as gpt-oss writes it: text and calls are messages."""
    messages = [f"<|channel|>commentary<|message|>{content}<|end|>"] if content else []
    messages += [
        f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for tool, arguments in calls
    ]
    return "<|start|>assistant".join(messages)
