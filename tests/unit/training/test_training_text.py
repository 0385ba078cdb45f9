"""What the packaged model learnt from, and the template it speaks through."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from moeserve.cli.command_line import demonstration_model
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.conftest import TINY_MODEL
from tests.support.chats.template_conversations import CONVERSATIONS
from training.shape import CHAT_TEMPLATE, SHAPE
from training.text import arithmetic, requests
from training.text.mixture import example
from training.text.tools import call_only, say

EXAMPLES = [example(Random(f"test/{i}")) for i in range(400)]


@pytest.fixture(scope="module")
def templates() -> tuple[ChatTemplate, ChatTemplate]:
    """Ours, and Qwen3's, which the tiny model carries."""
    qwen3 = open_gguf(TINY_MODEL).metadata.require_str("tokenizer.chat_template")
    return ChatTemplate(CHAT_TEMPLATE.read_text(), {}), ChatTemplate(qwen3, {})


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_our_template_writes_what_qwen3s_writes(
    templates: tuple[ChatTemplate, ChatTemplate], conversation: dict[str, Any]
) -> None:
    ours, qwen3 = templates
    assert ours.render(**conversation) == qwen3.render(**conversation)


def test_it_does_for_whatever_was_learnt(templates: tuple[ChatTemplate, ChatTemplate]) -> None:
    ours, qwen3 = templates
    for one in EXAMPLES:
        kwargs = {} if one.enable_thinking is None else {"enable_thinking": one.enable_thinking}
        prompts = [
            t.render(one.messages, tools=list(one.tools) or None, kwargs=kwargs) for t in (ours, qwen3)
        ]
        assert prompts[0] == prompts[1]


def test_the_packaged_model_is_of_this_shape_and_template() -> None:
    path = demonstration_model()
    assert path.stat().st_size <= 8_000_000
    gguf = open_gguf(path)
    assert gguf.metadata.require_str("tokenizer.chat_template") == CHAT_TEMPLATE.read_text()
    # Q8_0 is a little over a byte each.
    assert sum(t.nbytes for t in gguf.tensors.values()) > SHAPE.parameters
    elements = 0
    for tensor in gguf.tensors.values():
        size = 1
        for dimension in tensor.shape:
            size *= dimension
        elements += size
    assert elements == SHAPE.parameters


def test_a_seed_is_a_text() -> None:
    assert example(Random("test/0")) == EXAMPLES[0]


def test_what_is_held_out_is_never_learnt_from() -> None:
    pairs, tools = 0, 0
    held_out = {name for kind in requests.HELD_OUT for name in kind.names}
    for i in range(400):
        one = arithmetic.arithmetic(Random(f"held out/{i}"))
        words = one.answer.replace(" - ", " + ").split(" + ")
        if len(words) == 2 and " = " in words[1]:
            pairs += 1
            assert (int(words[0]), int(words[1].split(" = ")[0])) not in arithmetic.HELD_OUT
    for one in EXAMPLES:
        names = {tool["function"]["name"] for tool in one.tools}
        tools += len(names)
        assert not names & held_out
    assert pairs > 200
    assert tools > 100
    assert len(arithmetic.HELD_OUT) == arithmetic.NUM_HELD_OUT


def test_sums_thoughts_and_calls_are_right() -> None:
    for a, b in ((37, 45), (5, 9), (999, 1), (82, 45), (45, 82), (100, 1)):
        assert arithmetic.how_to_add(a, b).endswith(f"So {a} + {b} = {a + b}.")
        assert arithmetic.how_to_subtract(a, b).endswith(f"So {a} - {b} = {a - b}.")
    assert "7 + 5 = 12, write 2, carry 1" in arithmetic.how_to_add(37, 45)
    for i in range(200):
        one = call_only(Random(i), held_out=i % 2 == 0)
        (call,) = one.calls
        (tool,) = (t["function"] for t in one.tools if t["function"]["name"] == call.name)
        assert set(call.arguments) <= set(tool["parameters"]["properties"])
        assert set(call.arguments) >= set(tool["parameters"].get("required", []))


def test_results_in_words() -> None:
    assert say('{"temperature": 21, "sky": "clear"}') == "The temperature is 21 and the sky is clear."
    assert say('{"error": "not found"}') == "The tool failed: not found."
    assert say("42") == "The result is: 42"
    assert say(json.dumps({"status": "ok"})) == "Done."
