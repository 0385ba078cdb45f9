"""Solar Open's answers: what its template writes, and what public reports show."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from moeserve.chatformat.events import Text
from moeserve.chatformat.output import joined
from moeserve.chatformat.solar_open import ANSWER_FOLLOWS, SolarMessages, parser
from tests.support.chats.chat_events import Answer

BEGUN: Final = "<|begin|>assistant"
OFFERED: Final[dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
}
F: Final = ("f", {"a": "x"})
AGAIN: Final = f"<|end|>{BEGUN}"


def call(arguments: str = '{"a": "x"}', name: str = "f", call_id: str = "a1b2c3d4e5") -> str:
    return (
        f"<|tool_call:begin|>{call_id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
    )


def read(text: str, size: int, begun: str = BEGUN, ended_by: str | None = "", **options: Any) -> Answer:
    given: dict[str, Any] = {"reads_calls": True, "offered": OFFERED} | options
    reader = parser(begun, **given)
    events = [event for at in range(0, len(text), size) for event in reader.push(text[at : at + size])]
    return Answer.of(joined([*events, *reader.finish(ended_by)]))


# The forms come from the tests and reports of vLLM, mlx-openai-server, llama.cpp's clients and GPTQModel.
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (f"<|think|>Hm.{ANSWER_FOLLOWS}Hi", Answer("Hi", "Hm.")),
        ("<|content|>Hi", Answer("Hi")),  # low effort: the prompt has an empty reasoning
        ("<|think|>Hm.<|end|><|content|>Hi", Answer("Hi", "Hm.")),
        (f"{BEGUN}<|content|>Hi", Answer("Hi")),
        (f"<|think|>Hm.{AGAIN} Hi", Answer(" Hi", "Hm.")),  # no token behind the role
        ("Hi", Answer("Hi")),
        (f"<|think|>Hm.{AGAIN}<|tool_calls|>{call()}", Answer("", "Hm.", [F])),
        (f"<|tool_calls|>{call()}{call('{}', call_id='b')}<|calls|>", Answer("", "", [F, ("f", {})])),
        (call(), Answer("", "", [F])),
        (call(call_id=""), Answer("", "", [F])),
        (call().replace("a1b2c3d4e5<|tool_call:name|>", ""), Answer("", "", [F])),
        ("<|tool_calls|>" + call("{'a': 'x', 'n': 3}"), Answer("", "", [("f", {"a": "x", "n": 3})])),
        ("<|tool_calls|>" + call('{"a": "서울 <b>"}'), Answer("", "", [("f", {"a": "서울 <b>"})])),
        (f"<|content|>Let me check.\n{AGAIN}<|tool_calls|>{call()}", Answer("Let me check.", "", [F])),
        (f"<|content|>Let me check.<|tool_calls|>{call()}<|calls|>", Answer("Let me check.", "", [F])),
        (f"<|tool_calls|>{call()}".removesuffix("<|tool_call:end|>"), Answer("", "", [F])),
        ("<|tool_calls|>" + call('{"a": "x"'), Answer("", "", [F])),
        (f"<|think|>Hm.<|tool_calls|>{call()}", Answer("", "Hm.", [F])),  # the reasoning is not closed
        ("<|content|>If a < b, use {x} or [y].\n", Answer("If a < b, use {x} or [y].\n")),
        (f"<|content|>One.{AGAIN}<|content|>Two.", Answer("One.\n\nTwo.")),
        (f"<|think|>Hm.{AGAIN}<|think|>Well.{AGAIN}<|content|>Hi", Answer("Hi", "Hm.\n\nWell.")),
    ],
)
def test_an_answer_is_read_as_it_is_meant(text: str, meant: Answer) -> None:
    for size in (len(text), 1, 3, 7):
        assert read(text, size) == meant, size


def test_what_is_no_call_is_text() -> None:
    broken = f"<|tool_calls|>{call('no JSON')}"
    assert read(broken, 1) == Answer(broken)
    assert read(call("{}"), 1, reads_calls=False) == Answer(call("{}"))
    cut = call().removesuffix('x"}<|tool_call:end|>')
    assert read(cut, 1, ended_by=None) == Answer(cut)


def test_a_prompt_may_have_begun_the_text() -> None:
    assert read(" jumps", 1, begun=f"{BEGUN}<|content|>The dog") == Answer(" jumps")


def test_reasoning_may_stay_in_the_text() -> None:
    assert read(f"<|think|>Hm.{ANSWER_FOLLOWS}Hi", 1, separates_reasoning=False) == Answer("Hm.\n\nHi")


def test_an_answer_that_is_cut_off_shows_no_tags() -> None:
    """A tag is one token, so an answer ends before it or behind it."""
    tokens = re.findall(r"<[^>]*>|.", f"<|think|>Hm.{ANSWER_FOLLOWS}Hi")
    for count in range(len(tokens) + 1):
        answer = read("".join(tokens[:count]), 1, ended_by=None)
        assert "Hi".startswith(answer.text), count
        assert "Hm.".startswith(answer.reasoning), count


def test_white_space_before_the_text_is_held_up_to_a_bound() -> None:
    messages = SolarMessages(BEGUN)
    assert messages.push(" " * 1024) == []
    assert messages.push(" ") == [Text(" " * 1025)]
    assert messages.push("Hi") == [Text("H"), Text("i")]
