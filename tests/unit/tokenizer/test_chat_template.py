"""Chat templates render as Hugging Face's `apply_chat_template` renders them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import ChatRenderer, TemplateError, TemplateMissing, Vocabulary
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.conftest import TINY_MODEL
from tests.support.chats.rendering import render_now
from tests.support.chats.template_conversations import CONVERSATIONS, TOOLS, USER
from tests.support.models.gguf_bytes import gguf_bytes, model_metadata


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    gguf = open_gguf(TINY_MODEL)
    built = ChatRenderer.from_gguf(gguf, Vocabulary.from_gguf(gguf))
    yield built
    built.close()


def _hugging_face(template: str, conversation: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    result: Any = render_jinja_template(
        [conversation["messages"]],
        conversation.get("tools"),
        chat_template=template,
        add_generation_prompt=conversation.get("add_generation_prompt", True),
        **conversation.get("kwargs", {}),
    )
    rendered, _ = result
    return str(rendered[0])


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_qwen3_template_renders_as_in_transformers(
    renderer: ChatRenderer, conversation: dict[str, Any]
) -> None:
    template = open_gguf(TINY_MODEL).metadata.require_str("tokenizer.chat_template")
    assert render_now(renderer, **conversation) == _hugging_face(template, conversation)


def test_packaged_template_is_the_published_one(wide_fixtures: Path) -> None:
    published = (wide_fixtures / "tokenizer" / "qwen3-chat-template.jinja").read_text()
    assert open_gguf(TINY_MODEL).metadata["tokenizer.chat_template"] == published


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n    {% if m.content %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
        "{%- for m in messages -%} {% if loop.index > 1 %}{% break %}{% endif %}[{{ m.role }}]{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ {'b': '<ü>', 'a': 1} | tojson(sort_keys=true) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{{ messages[0].content.split(' ')[-1].strip('?') }}{{ missing }}{{ tools is none }}{{ 'A' | lower }}",
        "{{ strftime_now('%Y-%m-%d') }}",
    ],
)
def test_template_features_behave_as_in_transformers(template: str) -> None:
    conversation = {"messages": [USER, {"role": "assistant", "content": "42"}]}
    ours = ChatTemplate(template, {}).render(conversation["messages"])
    assert ours == _hugging_face(template, conversation)


def test_conversations_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    named = {"tokenizer__chat_template.tool_use": "with {{ (tools or []) | length }} tools"}
    for plain, expected in (("without", "without"), (None, "with 0 tools")):
        templates = named if plain is None else named | {"tokenizer__chat_template": plain}
        path.write_bytes(gguf_bytes(model_metadata(**templates)))
        gguf = open_gguf(path)
        renderer = ChatRenderer.from_gguf(gguf, Vocabulary.from_gguf(gguf))
        try:
            assert render_now(renderer, [USER], tools=TOOLS) == "with 1 tools"
            assert render_now(renderer, [USER]) == render_now(renderer, [USER], tools=[]) == expected
        finally:
            renderer.close()
    chosen = ChatRenderer.from_gguf(gguf, Vocabulary.from_gguf(gguf), template="mine")
    try:
        assert render_now(chosen, [USER], tools=TOOLS) == "mine"
    finally:
        chosen.close()


def test_templates_collect_in_lists() -> None:
    """llama.cpp's own of Kimi do, which transformers refuses. What one render adds is not there in the next."""
    source = (
        "{% set seen = namespace(ids=[]) %}{% for m in messages %}{% set _ = seen.ids.append(m.role) %}{% endfor %}"
        "{% set _ = messages.append(messages[0]) %}"
        "{{ seen.ids.pop(0) }} {{ seen.ids | length }} {{ messages | length }}"
    )
    template = ChatTemplate(source, {})
    for _ in range(2):
        assert template.render([USER, USER]) == "user 1 3"
    for refused in (
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.clear() }}",
        "{{ messages.sort() }}",
    ):
        with pytest.raises(TemplateError, match="SecurityError"):
            ChatTemplate(refused, {}).render([USER])


def test_raise_exception_reaches_the_client_as_it_stands() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate, got ' + messages[0].role) }}", {})
    with pytest.raises(TemplateError) as caught:
        template.render([USER])
    assert str(caught.value) == "roles must alternate, got user"


def test_the_files_special_tokens_are_variables(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    source = "{{ bos_token }}|{{ eos_token }}|{{ kind }}"
    path.write_bytes(
        gguf_bytes(model_metadata(tokenizer__ggml__bos_token_id=258) | {"tokenizer.chat_template": source})
    )
    gguf = open_gguf(path)
    built = ChatRenderer.from_gguf(gguf, Vocabulary.from_gguf(gguf))
    try:
        assert render_now(built, [USER], kwargs={"kind": "x"}) == "<|endoftext|>|<|im_end|>|x"
    finally:
        built.close()


def test_a_file_without_a_template_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(model_metadata()))
    gguf = open_gguf(path)
    built = ChatRenderer.from_gguf(gguf, Vocabulary.from_gguf(gguf))
    assert built.source is None
    with pytest.raises(TemplateMissing, match=r"carries no chat template.* use /v1/completions"):
        render_now(built, [USER])
    built.close()


def test_a_wrong_template_is_found_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(model_metadata() | {"tokenizer.chat_template": "a\n{% if %}"}))
    gguf = open_gguf(path)
    with pytest.raises(ModelError, match=r"model\.gguf: the chat template has an error in line 2"):
        ChatRenderer.from_gguf(gguf, Vocabulary.from_gguf(gguf))


def test_requests_may_not_take_the_place_of_the_messages(renderer: ChatRenderer) -> None:
    with pytest.raises(TemplateError, match="chat_template_kwargs may not set messages, tools"):
        render_now(renderer, [USER], kwargs={"tools": [], "messages": [], "x": 1})


@pytest.mark.parametrize("content", ["\ud800", object()])
def test_what_cannot_be_passed_on_is_the_clients_error(renderer: ChatRenderer, content: object) -> None:
    with pytest.raises(TemplateError, match="cannot be passed to the chat template"):
        render_now(renderer, [{"role": "user", "content": content}])


def test_renders_at_once_do_not_mix(renderer: ChatRenderer) -> None:
    async def run() -> list[str]:
        messages = [[{"role": "user", "content": f"<{i}>"}] for i in range(50)]
        return await asyncio.gather(*(renderer.render(m) for m in messages))

    for i, text in enumerate(asyncio.run(run())):
        assert text == f"<|im_start|>user\n<{i}><|im_end|>\n<|im_start|>assistant\n"


def test_a_render_costs_about_a_tenth_of_a_millisecond(renderer: ChatRenderer) -> None:
    async def run() -> float:
        """CPU seconds of this process and of those that render."""
        await renderer.render([USER])
        processes = [psutil.Process(), *psutil.Process().children()]
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        for _ in range(200):
            await renderer.render([USER])
        return sum(sum(process.cpu_times()[:2]) for process in processes) - before

    assert asyncio.run(run()) / 200 < 0.002  # measured: 0.0001 s


def test_time_of_day_is_local_time() -> None:
    before = datetime.now().strftime("%H")
    rendered = ChatTemplate("{{ strftime_now('%H') }}", {}).render([])
    assert rendered in {before, datetime.now().strftime("%H")}
