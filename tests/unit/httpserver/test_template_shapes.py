"""Every text of a conversation reaches the prompt, whatever its template drops or refuses: published kinds of
templates, in small."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from moeserve.httpserver.generation.chat.channels import Channels
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.chat_tools import FunctionCall, ToolCallMessage
from moeserve.httpserver.generation.chat.template_probe import Tools, shapes_of
from moeserve.httpserver.generation.chat.template_shape import Conversation, Shapes, TemplateShape
from moeserve.tokenizer.chat_template import ChatTemplate
from moeserve.tokenizer.errors import TemplateTimeout
from tests.support.chats.family_templates import TEMPLATES

_TURN: Final = (
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c | tojson }}]{% endfor %}\n"
)
_FIRST_SYSTEM: Final = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)
_ALTERNATING: Final = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
)


def _turns(of: str, turn: str = _TURN) -> str:
    return "{% for m in " + of + " %}" + turn + "{% endfor %}<assistant>"


# What each does is done by a published template, named behind it.
SHAPES: Final = {
    "every message": _turns("messages"),  # Qwen3
    "the first system message": _FIRST_SYSTEM  # gpt-oss, MiniMax-M2
    + _turns("rest", "{% if m.role != 'system' %}" + _TURN + "{% endif %}"),
    "the last system message": "{% set n = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"  # R1
    "{% set n.s = m.content %}{% endif %}{% endfor %}{{ n.s }}"
    + _turns("messages", "{% if m.role != 'system' %}" + _TURN + "{% endif %}"),
    "a system message first or none": _turns(  # Qwen3.5, which wants a user's, too
        "messages",
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
        "{% if not messages | selectattr('role', 'eq', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
        + _TURN,
    ),
    "no system message": _turns(  # Gemma 2
        "messages", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + _ALTERNATING + _TURN
    ),
    "alternating roles": _FIRST_SYSTEM + _turns("rest", _ALTERNATING + _TURN),  # Mistral-Nemo
}  # fmt: skip


@functools.cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, {})


@functools.cache
def shaped(template: str) -> tuple[Shapes, list[str]]:
    return shapes_of(lambda messages, tools, shape: rendered(template, messages, tools, shape))


def rendered(template: str, messages: Conversation, tools: Tools, shape: TemplateShape) -> str:
    formats = ChatFormats(shapes=Shapes(shape, shape))
    fitted, tools = formats.for_template(messages, tools, template)
    return compiled(template).render(copy.deepcopy(fitted), tools=tools)


def conversations(longest: int) -> Iterator[list[dict[str, Any]]]:
    """Yields every order of roles with texts of their own."""
    for length in range(1, longest + 1):
        for roles in itertools.product(("system", "user", "assistant"), repeat=length):
            yield [{"role": role, "content": f"text-{at}-end"} for at, role in enumerate(roles)]


@pytest.mark.parametrize("template", SHAPES.values(), ids=SHAPES)
def test_every_text_is_in_the_prompt_in_its_order(template: str) -> None:
    shapes, _ = shaped(template)
    for messages in conversations(4):
        before = copy.deepcopy(messages)
        text = rendered(template, messages, None, shapes.plain)
        places = [text.find(message["content"]) for message in messages]
        assert -1 not in places, (messages, text)
        hoists_system = "namespace" in template
        assert hoists_system or places == sorted(places), (messages, text)
        assert messages == before


@pytest.mark.parametrize("name", TEMPLATES)
def test_families_templates_lose_nothing(name: str) -> None:
    shapes, _ = shaped(TEMPLATES[name])
    for messages in conversations(3):
        text = rendered(TEMPLATES[name], messages, None, shapes.plain)
        assert all(message["content"] in text for message in messages), (messages, text)


def test_a_template_that_shows_all_is_left_alone() -> None:
    assert shaped(SHAPES["every message"]) == (Shapes(), [])


def test_what_is_done_is_said() -> None:
    shapes, found = shaped(SHAPES["the first system message"])
    assert shapes.plain == TemplateShape(joins_systems=True, moves_late_systems=True)
    assert found == [
        "a second system message (is joined to the first)",
        "a system message behind others (is shown as a user's)",
    ]
    assert shaped(_turns("messages", "{{ raise_exception('no') }}")) == (Shapes(), [])
    silent = _turns("messages", "{% if m.role != 'tool' %}" + _TURN + "{% endif %}")
    assert "calls (are shown as text)" in shaped(silent)[1]
    deaf = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + _turns(
        "messages"
    )
    assert "messages of users in a row (left out or refused)" in shaped(deaf)[1]


def test_a_template_without_end_is_not_asked_again() -> None:
    asked = []

    def render(messages: Conversation, tools: Tools, shape: TemplateShape) -> str:
        asked.append(messages)
        raise TemplateTimeout("the chat template did not finish within 2 s and was stopped")

    shapes, found = shapes_of(render)
    assert shapes == Shapes()
    assert len(asked) == len(found) == 1


CALL: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": "in-the-call"}}}
OTHER: Final = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": {"a": "in-the-other"}}}
ASKS: Final[dict[str, Any]] = {"role": "assistant", "content": "beside-it", "tool_calls": [CALL, OTHER]}
RESULTS: Final[list[dict[str, Any]]] = [
    {"role": "tool", "content": "of-the-other", "tool_call_id": "c2"},
    {"role": "tool", "content": "of-the-call", "tool_call_id": "c1"},
]
USER: Final[dict[str, Any]] = {"role": "user", "content": "question"}
_NO_TEXT_BESIDE: Final = _turns(  # llama.cpp's R1
    "messages",
    "<{{ m.role }}>{% if m.content %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}{% endif %}\n",
)
_ONE_CALL: Final = _turns(  # Llama 3
    "messages",
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% else %}{{ m.content }}{% endif %}\n",
)
_NO_CALLS: Final = _turns("messages", "{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}\n{% endif %}")
_NO_LONE_RESULT: Final = _turns(  # gpt-oss, MiniMax-M2
    "messages",
    "{% if m.role == 'tool' and (loop.first or messages[loop.index0 - 1].role not in ('tool', 'assistant')) %}"
    "{{ raise_exception('no call') }}{% endif %}" + _TURN,
)
_FIRST_AND_TOOLS: Final = _FIRST_SYSTEM + _turns(
    "rest", "{% if m.role != 'system' %}" + _TURN + "{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (_NO_TEXT_BESIDE, [USER, ASKS, *RESULTS]),
        (_ONE_CALL, [USER, ASKS, *RESULTS]),
        (_NO_CALLS, [USER, ASKS, *RESULTS]),
        (_NO_LONE_RESULT, [USER, *RESULTS]),
        (_NO_LONE_RESULT, [USER, ASKS, RESULTS[0], {"role": "system", "content": "between"}, RESULTS[1]]),
        (_FIRST_AND_TOOLS, [USER, ASKS, {"role": "system", "content": "between"}, *RESULTS]),
    ],
)
def test_calls_their_results_and_the_text_beside_them(template: str, messages: Conversation) -> None:
    shapes, _ = shaped(template)
    text = rendered(template, messages, None, shapes.plain)
    contents = [one["content"] for one in messages]
    calls = [c["function"]["arguments"]["a"] for one in messages for c in one.get("tool_calls", [])]
    assert all(mark in text for mark in contents + calls), text


_CHANNELS: Final = (  # gpt-oss's templates: what stands beside a call is the thought of it
    "{% for m in messages %}{% if m.tool_calls %}REASONING<call>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<{{ 'final' if m.role == 'assistant' else m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
_WITH_REASONING: Final = _CHANNELS.replace(  # left out once a text without a call has followed
    "REASONING",
    "{% set ns = namespace(later=false) %}{% for o in messages[loop.index:] %}"
    "{% if o.role == 'assistant' and not o.tool_calls %}{% set ns.later = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not ns.later %}<analysis>{{ m.thinking }}{% endif %}",
)


@pytest.mark.parametrize(
    ("template", "now"),
    [
        (_CHANNELS.replace("REASONING", ""), "<final>beside-it<call>"),
        (_WITH_REASONING, "<analysis>beside-it<call>"),
    ],
)
def test_gpt_oss_templates_keep_the_text_beside_a_call(template: str, now: str) -> None:
    formats = ChatFormats(channels=Channels({}, reads_calls=True, separates_reasoning=True))

    def text(messages: Conversation, tools: Tools, shape: TemplateShape) -> str:
        fitted, _ = replace(formats, shapes=Shapes(shape, shape)).for_template(messages, tools, template)
        return ChatTemplate(template, {}).render(fitted)

    shapes, _ = shapes_of(text)
    turn = [USER, ASKS | {"tool_calls": [CALL]}, RESULTS[1]]
    assert now in text(turn, None, shapes.plain)
    answered = [*turn, {"role": "assistant", "content": "answer"}, USER]
    assert "<final>beside-it<call>" in text(answered, None, shapes.plain)


def test_a_result_follows_its_call_where_each_has_a_message() -> None:
    shapes, _ = shaped(_ONE_CALL)
    text = rendered(_ONE_CALL, [USER, ASKS, *RESULTS], None, shapes.plain)
    marks = ["beside-it", "in-the-call", "of-the-call", "in-the-other", "of-the-other"]
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)


_ITEMS: Final = _turns(  # Qwen3-Coder, GLM, MiniMax
    "messages",
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}\n",
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": "x', "[f a=x]"),
        ('{"a": "x\\', "[f a=x]"),
        ('{"a": ["x", {"b": "y', "[f a=['x', {'b': 'y'}]]"),
        ('{"a": 1, "b": "x"', "[f a=1 b=x]"),
        ('{"a": "x",', "[f a=x]"),
        ('{"a": "two\nlines"}', "[f a=two\nlines]"),
        ("{'a': None}", "[f a=None]"),
        ('{"a": "x", "b', '[f arguments={"a": "x", "b]'),
        ('{"a": tru', '[f arguments={"a": tru]'),
        ('["x"]', "[f arguments=['x']]"),
        ('"x"', "[f arguments=x]"),
        ("a=1", "[f arguments=a=1]"),
        ("null", "[f]"),
        ("", "[f]"),
        ("  ", "[f]"),
        ("{" * 5000, "[f arguments=" + "{" * 5000 + "]"),
        ("[" * 200_000, "[f arguments=" + "[" * 200_000 + "]"),
    ],
)
def test_a_call_that_was_cut_off_is_shown_as_the_template_can(arguments: str, shown: str) -> None:
    call = ToolCallMessage(id="c", function=FunctionCall(name="f", arguments=arguments)).for_template()
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULTS[0]]
    shapes, found = shaped(_ITEMS)
    assert found == ["arguments that are not an object (are shown as one)"]
    assert shown in rendered(_ITEMS, messages, None, shapes.plain)
    as_text = _turns("messages")
    assert shaped(as_text) == (Shapes(), [])
    if arguments.strip() not in ("", "null"):
        assert json.dumps(arguments, ensure_ascii=False)[1:-1] in rendered(
            as_text, messages, None, TemplateShape()
        )


_NEEDS_IDS: Final = _turns(  # Solar
    "messages",
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ 'call ' + c.id }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}{{ 'of ' + m.tool_call_id }}{% endif %}\n",
)


def test_calls_without_ids_get_ids_where_a_template_needs_them() -> None:
    calls = [{"type": "function", "function": one["function"]} for one in (CALL, OTHER)]
    results = [{"role": "tool", "content": one["content"]} for one in reversed(RESULTS)]
    shapes, _ = shaped(_NEEDS_IDS)
    text = rendered(_NEEDS_IDS, [USER, ASKS | {"tool_calls": calls}, *results], None, shapes.plain)
    assert "call call_1_0" in text
    assert "of-the-callof call_1_0" in text
    assert "of-the-otherof call_1_1" in text
    assert shaped(SHAPES["every message"])[0].plain.gives_ids is False


class _Renderer:
    """A template in this process, as `ChatFormats.probed` asks for it."""

    def __init__(self, source: str) -> None:
        self.source = source

    def source_for(self, tools: Tools) -> str:
        return self.source

    def render_now(self, messages: Conversation, tools: Tools = None, kwargs: Any = None) -> str:
        return ChatTemplate(self.source, {}).render(copy.deepcopy(messages), tools=tools, **(kwargs or {}))


_UNDESCRIBED: Final = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_tools_without_a_description_where_a_template_needs_one() -> None:
    source = "{% for t in tools or [] %}{{ 'of ' + t.function.description }}{% endfor %}" + _turns("messages")
    formats = ChatFormats().probed(_Renderer(source))  # type: ignore[arg-type]
    _, tools = formats.for_template([USER], [_UNDESCRIBED], source)
    assert tools == [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    lenient = "{{ tools | tojson }}" + _turns("messages")
    formats = ChatFormats().probed(_Renderer(lenient))  # type: ignore[arg-type]
    assert formats.for_template([USER], [_UNDESCRIBED], lenient)[1] == [_UNDESCRIBED]


def test_tools_that_are_shown_beside_a_user_only() -> None:  # Mistral
    source = (
        "{% if messages | selectattr('role', 'eq', 'user') | list %}{{ tools | tojson }}{% endif %}"
        + _turns("messages")
    )
    tool = {"type": "function", "function": {"name": "f", "description": "of-the-tool"}}
    shapes, _ = shaped(source)
    assert "of-the-tool" in rendered(source, [{"role": "system", "content": "x"}], [tool], shapes.with_tools)
    assert shapes.plain == TemplateShape()


def test_what_llama_cpps_templates_write_as_json() -> None:
    source = "{{ tools | map(attribute='function') | tojson }}{{ nothing | tojson }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate(source, {}).render([USER], tools=tools) == '[{"name": "f"}]null'
