"""The packaged model, served as the README's first command serves it, says things that are true."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clients.official_clients import openai_client
from tests.support.servers.server import Server
from training import evaluate
from training.text import arithmetic, smalltalk
from training.text.example import Example
from training.text.tools import call_only

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "moeserve-demo-q8_0"
QUIET: Any = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIMER: Any = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Set a timer",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}},
            "required": ["minutes"],
        },
    },
}


@pytest.fixture(scope="module")
def client(demonstration: Server) -> OpenAI:
    return openai_client(demonstration.base_url)


def ask(client: OpenAI, *messages: Any, thinking: bool = False, **wish: Any) -> Any:
    """The greedy answer's only choice; messages as texts of the user, or as they are."""
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": m} if isinstance(m, str) else m for m in messages],
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        **wish,
    ).choices[0]


def num_right(server: Server, examples: list[Example], thinking: bool = False) -> int:
    """Right to the letter, ended by themselves (training.evaluate)."""
    asked = [evaluate.thinking(example, thinking) for example in examples]
    outcomes = evaluate.of_server(server.base_url)(asked)
    return sum(outcome.is_right(example) for outcome, example in zip(outcomes, asked, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [False, True])
def test_it_adds_two_digit_numbers(demonstration: Server, thinking: bool) -> None:
    """The pairs were in no text that the model has learnt from."""
    pairs = Random(6).sample(sorted(arithmetic.HELD_OUT), 30)
    sums = [arithmetic.added("What is {a} + {b}?", a, b) for a, b in pairs]
    assert num_right(demonstration, sums, thinking) >= 28


def test_it_calls_the_right_tool(demonstration: Server) -> None:
    """With the right arguments, among other tools; most of these tools were made up for the question."""
    requests = [call_only(Random(f"test/{i}"), held_out=False) for i in range(20)]
    assert num_right(demonstration, requests) >= 16


def test_a_tool_is_called_and_its_result_told(client: OpenAI) -> None:
    question = "What is the weather in Lisbon?"
    called = ask(client, question, tools=[TIMER, WEATHER], tool_choice="auto")
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    user = {"role": "user", "content": question}
    told = ask(client, user, called.message.model_dump(exclude_none=True), result, tools=[TIMER, WEATHER])
    assert told.message.content == "The temperature is 21 and the condition is sunny."
    assert told.finish_reason == "stop"


def test_a_streamed_call(client: OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Set a timer for 12 minutes."}],
        tools=[TIMER, WEATHER],
        temperature=0,
        stream=True,
        extra_body=QUIET,
    )
    calls = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.name for call in calls if call and call.name] == ["set_timer"]
    assert json.loads("".join(call.arguments or "" for call in calls if call)) == {"minutes": 12}


def test_it_leaves_tools_alone_that_it_does_not_need(client: OpenAI) -> None:
    answer = ask(client, "What is 12 + 30?", tools=[TIMER, WEATHER])
    assert answer.message.tool_calls is None
    assert answer.message.content == "12 + 30 = 42"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Where is Ben?", "Ben is in the garden."),
        ("What does Mia have?", "Mia has a red ball."),
        ("What colour is the ball?", "The ball is red."),
        ("Where does Tom live?", "Tom lives in Oslo."),
        ("What is Ada's job?", "Ada is a doctor."),
    ],
)
def test_it_answers_questions_about_a_text(client: OpenAI, question: str, answer: str) -> None:
    text = "Tom lives in Oslo. Mia has a red ball. Ben is in the garden. Ada is a doctor."
    assert ask(client, f"{text}\n\n{question}").message.content == answer


def test_it_remembers_what_it_was_told(client: OpenAI) -> None:
    told = ask(client, "My name is Nora.")
    assert "Nora" in told.message.content
    earlier = [
        {"role": "user", "content": "My name is Nora."},
        {"role": "assistant", "content": told.message.content},
    ]
    assert ask(client, *earlier, "What is my name?").message.content == "Your name is Nora."


def test_it_stops_by_itself(client: OpenAI) -> None:
    for prompt in ("Hello!", "Who are you?", "Tell me a story about a fox.", "Count from 3 to 9."):
        answer = ask(client, prompt, max_tokens=400)
        assert answer.finish_reason == "stop"
        assert answer.message.content


def test_it_says_what_it_cannot_do(client: OpenAI) -> None:
    assert ask(client, "What is the capital of France?").message.content == smalltalk.DO_NOT_KNOW


@pytest.mark.slow
def test_it_thinks_when_it_may(client: OpenAI) -> None:
    thought = ask(client, "What is 37 + 45?", thinking=True)
    assert "7 + 5 = 12" in thought.message.reasoning_content
    assert thought.message.content == "37 + 45 = 82"
    for answer in (ask(client, "What is 37 + 45?"), ask(client, "What is 37 + 45? /no_think", thinking=True)):
        assert not (getattr(answer.message, "reasoning_content", None) or "").strip()
        assert answer.message.content == "37 + 45 = 82"
