"""The names that vLLM and SGLang give to parsers of tool calls and of reasoning, and moeserve's parsers for the same
formats.

A name whose format has no parser here means `auto`: the model's chat template shows the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By moeserve's parser: the other servers' names for it. gpt-oss's calls are recognised with its channels.
_TOOL_CALLS: Final = {
    "hermes": "qwen25 qwen",
    "qwen3_coder": "qwen3_xml qwen3coder nemotron_v3 nano_v3 mimo step3p5",
    "glm45": "glm glm47",
    "llama": "llama3_json llama4_json llama3",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4",
    "minimax_m2": "minimax-m2",
    "hunyuan": "hunyuan_a13b",
    "phi4_mini": "phi4_mini_json",
    "auto": "openai gpt-oss openai_gptoss gptoss pythonic llama4_pythonic olmo3 step3 ernie45 internlm "
    "interns1 jamba granite-20b-fc granite4 xlam longcat gigachat3 functiongemma minimax "
    "trinity laguna",
}
_REASONING: Final = {
    "qwen3": "deepseek_r1 deepseek-r1 deepseek_v3 deepseek-v3 deepseek_v31 deepseek_v32 deepseek_v4 glm45 glm47 glm "
    "minimax_m2 minimax-m2 minimax kimi_k2 kimi step3 step3p5 nemotron_v3 nano_v3 qwen3-thinking qwen3_5 olmo3 mimo",
    "harmony": "gpt-oss openai_gptoss gptoss",
    "hunyuan": "hunyuan_a13b",
    "ernie": "ernie45",
    "auto": "granite holo2 minimax_m2_append_think minimax-append-think interns1",
}


def _by_other_name(names: Mapping[str, str]) -> dict[str, str]:
    return {name: ours for ours, others in names.items() for name in others.split()}


TOOL_CALLS: Final = _by_other_name(_TOOL_CALLS)
REASONING: Final = _by_other_name(_REASONING)
