"""A client's effort reaches chat templates in their own words: the forms of published templates, in small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from moeserve.httpserver.generation.chat.template_efforts import TemplateEfforts, efforts_of
from moeserve.httpserver.generation.request.thinking import ThinkingOptions
from moeserve.tokenizer.chat_template import ChatTemplate
from moeserve.tokenizer.errors import TemplateTimeout

_TURNS: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{{ '<think>' if enable_thinking is undefined or enable_thinking else '<think></think>' }}"
)
TEMPLATES: Final = {
    "GLM-5.3": "{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort in "
    "['low', 'high'] else 'max' -%}Effort: {{ effort | capitalize }}",
    "Qwen3.8": "{% if enable_thinking is undefined or enable_thinking %}{% set effort = reasoning_effort"
    "|default('xhigh') %}{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('Unexpected reasoning "
    "effort') }}{% endif %}{% if effort != 'medium' %}Effort: {{ effort }}{% endif %}{% endif %}",
    "Hunyuan 3": "{% if not reasoning_effort is defined or reasoning_effort not in ['high', 'low', 'no_think'] %}"
    "{% set reasoning_effort = 'no_think' %}{% endif %}Effort: {{ reasoning_effort }}",
    "Mistral Small 4": "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'none' %}{% endif %}"
    "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('reasoning_effort is none or high') }}"
    "{% endif %}[{{ reasoning_effort }}]",
    "any word": "Reasoning: {{ reasoning_effort or 'medium' }}",
    "thinking only": "{% if thinking %}{{ 'Think hard. ' if reasoning_effort == 'max' else '' }}{% endif %}",
    "a remark": "{# reasoning_effort is for others, none here #}",
}


def efforts(of: str) -> TemplateEfforts:
    template = ChatTemplate(TEMPLATES[of] + _TURNS, {})

    def render(kwargs: Mapping[str, Any]) -> str:
        return template.render([{"role": "user", "content": "Hi"}], kwargs=kwargs)

    return efforts_of(TEMPLATES[of], render)


@pytest.mark.parametrize(
    ("of", "off", "levels"),
    [
        ("GLM-5.3", None, ("low", "high", "max")),
        ("Qwen3.8", None, ("low", "medium", "xhigh")),
        ("Hunyuan 3", "no_think", ("low", "high")),
        ("Mistral Small 4", "none", ("high",)),
        ("any word", "none", ("minimal", "low", "medium", "high", "xhigh", "max")),
        ("thinking only", None, ("max",)),
        ("a remark", None, ()),
    ],
)
def test_the_words_that_a_template_knows(of: str, off: str | None, levels: tuple[str, ...]) -> None:
    assert efforts(of) == TemplateEfforts(off, levels)


@pytest.mark.parametrize(
    ("of", "options", "word"),
    [
        ("GLM-5.3", ThinkingOptions(), None),
        ("GLM-5.3", ThinkingOptions(is_enabled=True), None),
        ("GLM-5.3", ThinkingOptions(effort="medium", budget=4096), "high"),
        ("GLM-5.3", ThinkingOptions(effort="xhigh"), "max"),
        ("GLM-5.3", ThinkingOptions(is_enabled=False, budget=0), "low"),
        ("GLM-5.3", ThinkingOptions(budget=1024), "low"),
        ("GLM-5.3", ThinkingOptions(budget=1025), "high"),
        ("GLM-5.3", ThinkingOptions(budget=20000), None),
        ("Qwen3.8", ThinkingOptions(effort="high", budget=16384), "xhigh"),
        ("Qwen3.8", ThinkingOptions(effort="max"), "xhigh"),
        ("Hunyuan 3", ThinkingOptions(is_enabled=False, budget=0, effort="none"), "no_think"),
        ("Mistral Small 4", ThinkingOptions(effort="minimal", budget=256), "high"),
        ("a remark", ThinkingOptions(effort="high"), None),
    ],
)
def test_the_word_for_what_a_client_asks(of: str, options: ThinkingOptions, word: str | None) -> None:
    assert efforts(of).word(options) == word


def test_a_template_without_end_costs_one_render() -> None:
    calls = 0

    def render(kwargs: Mapping[str, Any]) -> str:
        nonlocal calls
        calls += 1
        raise TemplateTimeout("did not finish")

    assert efforts_of("{{ reasoning_effort }}", render) == TemplateEfforts()
    assert calls == 1
