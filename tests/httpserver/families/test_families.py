"""Models whose tags are control tokens, through the chat API: gpt-oss's channels and DeepSeek's blocks of calls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chats.family_templates import TEMPLATES
from tests.support.chats.scripted_answers import MESSAGES, PARIS, TOOLS, ask, prompt_of
from tests.support.models.gguf_bytes import gguf_bytes, model_metadata, model_tensors
from tests.support.servers.family_server import serving
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"


harmony = serving("harmony")
deepseek = serving("deepseek_v31")
glm = serving("glm45")
minimax = serving("minimax_m3")


def call_of(message: dict[str, Any]) -> tuple[str, Any]:
    (call,) = message["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_minimax_m3_thinks_and_calls_behind_its_control_token(minimax: HttpServer) -> None:
    mark = "]<]minimax[>["
    call = f'{mark}<invoke name="weather">{mark}<city>Paris{mark}</city>{mark}</invoke>\n{mark}</tool_call>'
    minimax.answer = say("<mm:think>", "Hm.", f"</mm:think>Let me see.{mark}<tool_call>\n", call)
    choice = ask(minimax, tools=TOOLS)["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Let me see.", "Hm.")
    assert call_of(choice["message"]) == ("weather", PARIS)
    assert choice["finish_reason"] == "tool_calls"
    assert not prompt_of(minimax).endswith("</mm:think>")
    for switched_off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        ask(minimax, **switched_off)
        assert prompt_of(minimax).endswith("</mm:think>")
    # The template's own word comes first.
    ask(minimax, chat_template_kwargs={"enable_thinking": False, "thinking_mode": "enabled"})
    assert not prompt_of(minimax).endswith("</mm:think>")


def test_thoughts_texts_and_calls_come_from_their_channels(harmony: HttpServer) -> None:
    harmony.answer = say(ANALYSIS, "Let me", f" see.{NEXT}{FINAL}", "Hi", " you<|return|>")
    answer = ask(harmony)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi you", "Let me see.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    tokens = {word: harmony.tokenizer.encode(word)[0] for word in ("<|channel|>", "<|call|>", "<|return|>")}
    request = harmony.requests[-1]
    assert set(tokens.values()) <= set(request.text.shown_tokens)
    assert {tokens["<|call|>"], tokens["<|return|>"]} <= set(request.sampling.stop_token_ids)

    harmony.answer = say(ANALYSIS, f"Hm{NEXT}{TO_WEATHER}", '{"city": "Pa', 'ris"}<|call|>')
    choice = ask(harmony, tools=TOOLS)["choices"][0]
    assert call_of(choice["message"]) == ("weather", PARIS)
    assert choice["message"]["reasoning"] == "Hm"
    assert choice["finish_reason"] == "tool_calls"
    together = ask(harmony, tools=TOOLS, separate_reasoning=False)["choices"][0]["message"]
    assert together["content"] == "Hm"
    assert call_of(together) == ("weather", PARIS)


def test_what_the_channels_template_is_given(harmony: HttpServer) -> None:
    harmony.answer = say(f"{FINAL}Hi")
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": name})},
        }
        for name in ("Rome", "Oslo")
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "Snow.", "tool_call_id": "Oslo"},
        {"role": "tool", "content": "Sun.", "tool_call_id": "Rome"},
    ]
    ask(harmony, messages=messages, tools=TOOLS, reasoning_effort="high")
    prompt = prompt_of(harmony)
    assert prompt.startswith("<|start|>system<|message|>Reasoning: high<|end|>")
    assert "// Of a city.\ntype weather\n// \ntype now\n" in prompt
    call = (
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "CITY"}<|call|>'
    )
    result = '<|start|>functions to=assistant<|channel|>commentary<|message|>"WEATHER"<|end|>'
    assert prompt.endswith(
        f"<|start|>assistant{ANALYSIS}Hm.\n\nLet me see.<|end|>"
        + call.replace("CITY", "Rome")
        + result.replace("WEATHER", "Sun.")
        + call.replace("CITY", "Oslo")
        + result.replace("WEATHER", "Snow.")
        + "<|start|>assistant"
    )


def call_to(tool: str, city: str, **more: str) -> dict[str, Any]:
    return {"function": {"name": tool, "arguments": {"city": city}}} | more


@pytest.mark.parametrize(
    ("calls", "results"),
    [
        ([call_to("weather", "Rome"), call_to("weather", "Oslo")], [{}, {}]),
        (
            [call_to("weather", "Rome"), call_to("now", "Oslo")],
            [{"tool_name": "now", "content": "Oslo's"}, {"tool_name": "weather", "content": "Rome's"}],
        ),
        (
            [call_to("weather", "Rome", id="a"), call_to("weather", "Oslo", id="b")],
            [{"tool_call_id": "b", "content": "Oslo's"}, {"tool_call_id": "a", "content": "Rome's"}],
        ),
    ],
)
def test_each_result_follows_its_call(
    harmony: HttpServer, calls: list[dict[str, Any]], results: list[dict[str, Any]]
) -> None:
    """By its id, its tool or its place: Ollama's clients have no ids, or do."""
    harmony.answer = say(f"{FINAL}Hi")
    told = [
        {"role": "tool", "content": content} | result
        for result, content in zip(results, ("Rome's", "Oslo's"), strict=True)
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls}, *told]
    harmony.requests.clear()
    response = harmony.post(
        "/api/chat", {"model": NAME, "messages": messages, "tools": TOOLS, "stream": False}
    )
    assert response.status_code == 200, response.text
    said = re.findall("Rome's|Oslo's|Rome|Oslo", prompt_of(harmony))
    assert said == ["Rome", "Rome's", "Oslo", "Oslo's"]


@pytest.mark.parametrize(
    ("asked", "effort", "bound"),
    [
        ({}, "medium", None),
        ({"reasoning_effort": "none"}, "low", 0),
        ({"reasoning_effort": "minimal"}, "low", None),
        ({"reasoning_effort": "medium"}, "medium", None),
        ({"reasoning_effort": "max"}, "high", None),
        ({"thinking_token_budget": 2000}, "medium", 2000),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high", None),
    ],
)
def test_effort_is_the_templates_and_a_budget_a_bound(
    harmony: HttpServer, asked: dict[str, Any], effort: str, bound: int | None
) -> None:
    harmony.answer = say(f"{FINAL}Hi")
    ask(harmony, **asked)
    assert f"Reasoning: {effort}<|end|>" in prompt_of(harmony)
    grammar = harmony.requests[-1].sampling.grammar
    assert bool(grammar) == (bound is not None)
    if bound:
        assert f"max_tokens={bound}" in grammar


def test_grammars_hold_the_channels(harmony: HttpServer) -> None:
    harmony.answer = say(f"{TO_WEATHER}{json.dumps(PARIS)}<|call|>")
    assert call_of(ask(harmony, tools=TOOLS, tool_choice="required")["choices"][0]["message"]) == (
        "weather",
        PARIS,
    )
    grammar = harmony.requests[-1].sampling.grammar
    assert "functions.weather" in grammar
    assert "final)" not in grammar.partition("thought:")[0]
    harmony.answer = say(f"{FINAL}12")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    assert ask(harmony, response_format=schema)["choices"][0]["message"]["content"] == "12"
    assert "@answer" in harmony.requests[-1].sampling.grammar
    ask(harmony, tools=TOOLS, tool_choice="none")
    assert "functions." not in harmony.requests[-1].sampling.grammar
    assert "analysis" in harmony.requests[-1].sampling.grammar
    begun = [*MESSAGES, {"role": "assistant", "content": "The dog"}]
    harmony.answer = say(" jumps<|return|>")
    asked = {"add_generation_prompt": False, "continue_final_message": True, "response_format": schema}
    assert ask(harmony, messages=begun, **asked)["choices"][0]["message"]["content"] == " jumps"
    assert prompt_of(harmony).endswith(f"{FINAL}The dog")
    assert "analysis" not in harmony.requests[-1].sampling.grammar  # the text has been begun


def test_the_tag_that_ends_the_only_call_is_part_of_it(glm: HttpServer) -> None:
    """The token that ended the answer is not in its text."""
    (end,) = glm.tokenizer.encode("</tool_call>")
    for text, arguments in (
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n", PARIS),
        ("<tool_call>now", {}),
    ):
        glm.answer = say(text, stop_reason=end)
        choice = ask(glm, tools=TOOLS, parallel_tool_calls=False)["choices"][0]
        assert end in glm.requests[-1].sampling.stop_token_ids
        assert call_of(choice["message"])[1] == arguments
        assert choice["finish_reason"] == "tool_calls"


CALL = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'


def test_calls_between_control_tokens(deepseek: HttpServer) -> None:
    deepseek.answer = say("Well. <｜tool▁calls▁begin｜>", CALL[:30], CALL[30:], CALL, "<｜tool▁calls▁end｜>")
    message = ask(deepseek, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] == "Well."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [PARIS, PARIS]
    opening, end = (
        deepseek.tokenizer.encode(tag)[0] for tag in ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>")
    )
    assert opening in deepseek.requests[-1].text.shown_tokens
    ask(deepseek, tools=TOOLS, parallel_tool_calls=False)
    assert end in deepseek.requests[-1].sampling.stop_token_ids
    ask(deepseek, tools=TOOLS, tool_choice="none")
    assert deepseek.requests[-1].sampling.logit_bias == {opening: -100.0}
    assert not deepseek.requests[-1].text.shown_tokens
    ask(deepseek, tools=TOOLS, tool_choice="required")
    assert f"<[{opening}]>" in deepseek.requests[-1].sampling.grammar


def test_a_template_that_joins_texts_gets_arguments_as_text(deepseek: HttpServer) -> None:
    deepseek.answer = say("Hi")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": json.dumps(PARIS)}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "c"},
    ]
    ask(deepseek, messages=messages, tools=TOOLS)
    assert f"<｜tool▁calls▁begin｜>{CALL}<｜tool▁calls▁end｜>" in prompt_of(deepseek)


def test_the_template_for_tools_says_how_they_are_called(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    metadata = model_metadata(
        **{"tokenizer__chat_template": plain, "tokenizer__chat_template.tool_use": TEMPLATES["hermes"]}
    )
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, model_tensors()))
    with http_server(model=str(tmp_path / "model.gguf"), context=2048) as server:
        server.answer = say("<tool_call>", '{"name": "now", "arguments": {}}', "</tool_call>")
        assert call_of(ask(server, tools=TOOLS)["choices"][0]["message"]) == ("now", {})
        assert "# Tools" in prompt_of(server)
        server.answer = say("Hi")
        assert ask(server)["choices"][0]["message"]["content"] == "Hi"
        assert "# Tools" not in prompt_of(server)
