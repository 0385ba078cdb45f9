"""DeepSeek-V4's and Cohere's models through the chat API: their tokens, switches and grammars."""

from __future__ import annotations

import json
from typing import Any

from tests.support.chats.scripted_answers import MESSAGES, PARIS, TOOLS, ask, prompt_of
from tests.support.servers.family_server import serving
from tests.support.servers.http_harness import HttpServer, say

MARK = "｜DSML｜"
CALL = (
    f'<{MARK}invoke name="weather">\n<{MARK}parameter name="city" string="true">Paris</{MARK}parameter>\n'
    f"</{MARK}invoke>"
)


deepseek = serving("deepseek_v4")
cohere = serving("cohere")


def choice_of(server: HttpServer, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = ask(server, **fields)["choices"][0]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_deepseek_v4_thinks_and_calls(deepseek: HttpServer) -> None:
    block = f"<{MARK}tool_calls>\n{CALL}\n{CALL}\n</{MARK}tool_calls>"
    deepseek.answer = say("Hm.", f"</think>Let me see.\n\n{block[:40]}", block[40:])
    choice = choice_of(deepseek, tools=TOOLS, chat_template_kwargs={"thinking": True})
    assert prompt_of(deepseek).endswith("<｜Assistant｜><think>")
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Let me see.", "Hm.")
    assert calls_of(choice) == [("weather", PARIS)] * 2
    assert choice["finish_reason"] == "tool_calls"
    deepseek.answer = say("Hi")
    choice_of(deepseek, reasoning_effort="none")
    assert prompt_of(deepseek).endswith("<｜Assistant｜></think>")


def test_the_mark_of_dsml_is_text_and_excluded_where_no_call_may_come(deepseek: HttpServer) -> None:
    """Its file says that it is a control token, which no text would show."""
    (mark,) = deepseek.tokenizer.encode(MARK)
    deepseek.answer = say("Hi")
    choice_of(deepseek, tools=TOOLS, tool_choice="none")
    assert deepseek.requests[-1].sampling.logit_bias == {mark: -100.0}
    deepseek.answer = say(f"<{MARK}tool_calls>\n{CALL}\n</{MARK}tool_calls>")
    choice = choice_of(deepseek, tools=TOOLS, tool_choice="required", chat_template_kwargs={"thinking": True})
    assert calls_of(choice) == [("weather", PARIS)]  # which ends the reasoning
    sampling = deepseek.requests[-1].sampling
    assert sampling.thinking is not None
    assert (sampling.thinking.call_lead, sampling.thinking.call_token) == (
        *deepseek.tokenizer.encode("<"),
        mark,
    )
    assert 'parameter name=\\"' in sampling.grammar
    assert '" string=\\"true\\">"' in sampling.grammar.replace('city\\"', '"')


def test_deepseeks_history_has_its_own_tags(deepseek: HttpServer) -> None:
    deepseek.answer = say("Hi")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": json.dumps(PARIS)}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "c"},
    ]
    choice_of(deepseek, messages=messages, tools=TOOLS)
    assert f"<{MARK}tool_calls>\n{CALL}\n</{MARK}tool_calls><｜end" in prompt_of(deepseek)
    assert "<tool_result>Rain.</tool_result>" in prompt_of(deepseek)


ACTION = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}\n]'
)


def test_coheres_answer_is_without_its_tokens(cohere: HttpServer) -> None:
    cohere.answer = say("I think", " so.<|END_THINKING|>", "Hello.")
    choice = choice_of(cohere)
    assert prompt_of(cohere).endswith("<|CHATBOT_TOKEN|><|START_THINKING|>")
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Hello.", "I think so.")
    framing = {cohere.tokenizer.encode(tag)[0] for tag in ("<|START_TEXT|>", "<|END_TEXT|>")}
    assert framing <= cohere.tokenizer.vocabulary.special  # which text lacks
    (end,) = cohere.tokenizer.encode("<|END_OF_TURN_TOKEN|>")
    assert end in cohere.tokenizer.vocabulary.eos_ids
    for switched_off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        cohere.answer = say("Hello.")
        assert choice_of(cohere, **switched_off)["message"]["content"] == "Hello."
        assert prompt_of(cohere).endswith("<|START_THINKING|><|END_THINKING|>")
    choice_of(
        cohere, reasoning_effort="none", chat_template_kwargs={"reasoning": True}
    )  # the template's own word
    assert prompt_of(cohere).endswith("<|CHATBOT_TOKEN|><|START_THINKING|>")


def test_cohere_calls_tools(cohere: HttpServer) -> None:
    opening, end = (cohere.tokenizer.encode(tag)[0] for tag in ("<|START_ACTION|>", "<|END_ACTION|>"))
    cohere.answer = say("I need it.<|END_THINKING|>", ACTION[:50], ACTION[50:] + "<|END_ACTION|>")
    choice = choice_of(cohere, tools=TOOLS)
    assert (choice["message"]["content"] or "", choice["message"]["reasoning"]) == ("", "I need it.")
    assert calls_of(choice) == [("weather", PARIS)]
    assert {opening, end} <= set(cohere.requests[-1].text.shown_tokens)
    cohere.answer = say("I need it.", ACTION + "<|END_ACTION|>")  # without an end of the reasoning
    assert calls_of(choice_of(cohere, tools=TOOLS)) == [("weather", PARIS)]
    assert calls_of(choice_of(cohere, tools=TOOLS, tool_choice="required")) == [("weather", PARIS)]
    sampling = cohere.requests[-1].sampling
    assert sampling.thinking is not None
    assert sampling.thinking.call_token == opening
    assert '\\"tool_name\\": \\"weather\\", \\"parameters\\": ' in sampling.grammar
    choice_of(cohere, tools=TOOLS, parallel_tool_calls=False)
    assert end in cohere.requests[-1].sampling.stop_token_ids
    cohere.answer = say("Hi")
    choice_of(cohere, tools=TOOLS, tool_choice="none")
    assert cohere.requests[-1].sampling.logit_bias == {opening: -100.0}


def test_coheres_history_has_ids_that_count(cohere: HttpServer) -> None:
    cohere.answer = say("Hi")
    call = {
        "id": "call_9",
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps(PARIS)},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "call_9"},
    ]
    choice_of(cohere, messages=messages, tools=TOOLS)
    assert '"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}' in prompt_of(
        cohere
    )
    assert '"tool_call_id": "0", "results": {"0": "Rain."}' in prompt_of(cohere)
