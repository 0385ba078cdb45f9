"""Answers that models give beside their format, through the whole server: whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.chats.family_templates import HARMONY
from tests.support.chats.scripted_model import chat_template, write_scripted_model
from tests.support.servers.server import Server, running_server, stream_events

STRING: Final = {"type": "string"}
TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": STRING, "b": STRING}}},
    }
]
BODY: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": TOOLS,
    "max_tokens": 60,
}
Outcome = tuple[str, str, list[tuple[str, Any]], str]  # content, reasoning, calls, finish reason

pytestmark = pytest.mark.slow


def whole(server: Server, **fields: Any) -> Outcome:
    choice = server.post("/v1/chat/completions", BODY | fields)["choices"][0]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message["content"] or "", message.get("reasoning") or "", calls, choice["finish_reason"]


def streamed(server: Server, **fields: Any) -> Outcome:
    content, reasoning, reason = "", "", ""
    calls: list[list[str]] = []
    url = server.base_url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=BODY | fields | {"stream": True}, timeout=60) as response:
        events = [*stream_events(response)]
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        reason = choice["finish_reason"] or reason
        for call in delta.get("tool_calls") or []:
            calls += [["", ""]] * (call["index"] == len(calls))
            function = call["function"]
            name, arguments = calls[call["index"]]
            calls[call["index"]] = [
                name + (function.get("name") or ""),
                arguments + (function.get("arguments") or ""),
            ]
    return content, reasoning, [(name, json.loads(text)) for name, text in calls], reason


def in_both_ways(model: Path, **fields: Any) -> Outcome:
    with running_server(model, "--max-num-seqs", "4") as server:
        outcome = whole(server, **fields)
        assert streamed(server, **fields) == outcome
        return outcome


def test_a_call_within_an_unclosed_thought_without_its_last_tags(tmp_path: Path) -> None:
    script = [
        "I should ",
        "look.\n",
        "<tool_call>",
        "\n<function=f>\n<parameter=a>\n",
        "x </parameter> y",
        "\n<parameter=b>\nz",
    ]
    script.append("\n</function>\n")
    model = write_scripted_model(
        tmp_path / "model.gguf",
        script,
        chat_template("<function=</think>", "<think>\n"),
        whole=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    )  # fmt: skip
    expected = ("", "I should look.", [("f", {"a": "x </parameter> y", "b": "z"})], "tool_calls")
    assert in_both_ways(model) == expected


def test_the_token_that_ends_the_only_call(tmp_path: Path) -> None:
    """It is not in the text."""
    script = [
        "<tool_call>",
        "f\n<arg_key>a</arg_key>\n<arg_value>",
        "x",
        "</arg_value>\n",
        "</tool_call>",
        "more",
    ]
    model = write_scripted_model(
        tmp_path / "model.gguf",
        script,
        chat_template("<arg_key>"),
        whole=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )
    assert in_both_ways(model, parallel_tool_calls=False) == ("", "", [("f", {"a": "x"})], "tool_calls")


def test_a_bracket_that_the_end_of_a_message_implies(tmp_path: Path) -> None:
    controls = (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )
    script = [
        "<|channel|>",
        "commentary",
        " to=functions.f ",
        "<|constrain|>",
        "json",
        "<|message|>",
        '{"a": "x"',
    ]
    model = write_scripted_model(
        tmp_path / "model.gguf",
        script,
        HARMONY,
        controls=(*controls, "<|endoftext|>"),
        whole=(),
        end="<|call|>",
    )
    assert in_both_ways(model) == ("", "", [("f", {"a": "x"})], "tool_calls")


@pytest.mark.parametrize("kind", [1, 4])
def test_an_end_that_the_file_marks_as_another_kind_of_token(tmp_path: Path, kind: int) -> None:
    model = write_scripted_model(
        tmp_path / "model.gguf",
        ["Hello", "<|im_end|>", "\n<|im_start|>user\n", "more"],
        chat_template(""),
        end="<|endoftext|>",
        kinds={"<|im_end|>": kind},
    )
    assert in_both_ways(model, tools=[]) == ("Hello", "", [], "stop")


# The end token comes after "Hm."; behind the line ends of the template's closing tag the model answers.
ENDS_IN_REASONING: Final = ("Hm.", "<|im_end|>", "\n", "It is 42.")
PLAIN: Final[dict[str, Any]] = {"tools": [], "seed": 1}


def thinking_model(path: Path) -> Path:
    return write_scripted_model(path, ENDS_IN_REASONING, chat_template("</think>", "<think>"))


def test_an_answer_follows_a_turn_that_ended_in_reasoning(tmp_path: Path) -> None:
    model = thinking_model(tmp_path / "model.gguf")
    with running_server(
        model,
        "--max-num-seqs",
        "4",
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 2}',
    ) as server:
        expected: Outcome = ("It is 42.", "Hm.", [], "stop")
        assert whole(server, **PLAIN) == expected
        assert whole(server, **PLAIN, thinking_token_budget=50) == expected
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "n": 3, "logprobs": True}
        answer = server.post("/v1/chat/completions", body)
        contents = [choice["message"]["content"] for choice in answer["choices"]]
        assert contents == ["It is 42."] * 3
        # "Hm.", a line end, the tag, two line ends, the answer and the end token
        assert answer["usage"]["completion_tokens"] == 3 * 7
        together = server.post("/v1/chat/completions", body | {"separate_reasoning": False, "n": 1})
        assert together["choices"][0]["message"]["content"] == "Hm."
        assert together["usage"]["completion_tokens"] == 2
        short = server.post("/v1/chat/completions", body | {"n": 1, "max_tokens": 5})["choices"][0]
        assert (short["message"]["content"], short["finish_reason"]) == ("", "stop")
        for choice in answer["choices"]:
            assert len(choice["logprobs"]["content"]) in (6, 7)


def test_such_an_answer_is_streamed_alike(tmp_path: Path) -> None:
    model = thinking_model(tmp_path / "model.gguf")
    assert in_both_ways(model, **PLAIN) == ("It is 42.", "Hm.", [], "stop")


def test_an_answer_follows_a_turn_that_ended_in_analysis(tmp_path: Path) -> None:
    controls = (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )
    model = write_scripted_model(
        tmp_path / "model.gguf",
        ["42", "<|return|>"],
        HARMONY.replace(
            "<|start|>assistant{% endif", "<|start|>assistant<|channel|>analysis<|message|>{% endif"
        ),
        controls=(*controls, "<|endoftext|>"),
        whole=(),
        end="<|return|>",
    )
    assert in_both_ways(model, **PLAIN) == ("42", "42", [], "stop")
