"""Forms of requests that other servers take: OpenAI's functions, flat tools, SGLang's grammars, llama-server's tokens,
Anthropic's documents and the tools that run there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats.scripted_answers import ANSWER, PARIS, SCHEMA, prompt_of
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, echo, say, tokens_of

CHAT = "/v1/chat/completions"
HI: Any = {"role": "user", "content": "Hi"}
WEATHER: Any = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}


_as_new = as_new(echo)


def taken(server: HttpServer, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def chat_prompt(server: HttpServer, **body: Any) -> str:
    taken(server, CHAT, {"messages": [HI], "max_tokens": 1} | body)
    return prompt_of(server)


def test_functions_are_answered_with_a_function_call(server: HttpServer) -> None:
    server.answer = say(*ANSWER)
    body: Any = {"messages": [HI], "functions": [WEATHER], "function_call": "auto"}
    (choice,) = taken(server, CHAT, body)["choices"]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", PARIS)
    told = {"role": "function", "name": "weather", "content": "Rain."}
    messages = [HI, {"role": "assistant", "content": None, "function_call": call}, told]
    prompt = chat_prompt(server, messages=messages, functions=[WEATHER])
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<tool_response>\nRain.\n</tool_response>" in prompt


def test_functions_in_a_stream(server: HttpServer) -> None:
    server.answer = say(*ANSWER)
    response = server.post(CHAT, {"messages": [HI], "functions": [WEATHER], "stream": True})
    events = [
        line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")
    ]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    calls = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert calls[0] == {"name": "weather", "arguments": ""}
    assert json.loads("".join(call["arguments"] for call in calls[:5])) == PARIS
    assert choices[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in choice["delta"] for choice in choices)


def test_a_function_that_must_be_called(server: HttpServer) -> None:
    chat_prompt(server, functions=[WEATHER], function_call={"name": "weather"})
    assert server.requests[-1].sampling.grammar
    for body, name in (
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"functions": [WEATHER, WEATHER]}, "functions"),
        ({"messages": [HI, {"role": "function", "content": "Rain."}]}, "messages"),
    ):
        refused = server.post(CHAT, {"messages": [HI]} | body)
        assert (refused.status_code, refused.json()["error"]["param"].split(".")[0]) == (400, name)


def test_flat_tools_are_the_wrapped_ones(server: HttpServer) -> None:
    wrapped = chat_prompt(server, tools=[{"type": "function", "function": WEATHER}])
    assert '"name": "weather"' in wrapped
    assert chat_prompt(server, tools=[{"type": "function"} | WEATHER]) == wrapped
    assert chat_prompt(server, tools=[WEATHER]) == wrapped
    chat_prompt(server, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert server.requests[-1].sampling.grammar


def test_modes_as_objects(server: HttpServer) -> None:
    tools = {"tools": [WEATHER]}
    for mode in ("auto", "none", "required"):
        grammars = []
        for choice in (mode, {"type": mode}):
            chat_prompt(server, tool_choice=choice, **tools)
            grammars.append(server.requests[-1].sampling.grammar)
        assert grammars[0] == grammars[1]


def test_other_forms_of_text_parts(server: HttpServer) -> None:
    parts: list[Any] = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    wanted = chat_prompt(server, messages=[{"role": "user", "content": parts}])
    for first in ("One", {"text": "One"}, {"type": "input_text", "text": "One"}):
        assert chat_prompt(server, messages=[{"role": "user", "content": [first, parts[1]]}]) == wanted
    said = [{"type": "output_text", "text": "Well", "annotations": []}]
    assert "Well" in chat_prompt(server, messages=[HI, {"role": "assistant", "content": said}, HI])


def test_reasoning_as_an_object(server: HttpServer) -> None:
    for given, ours in (
        ({"effort": "low"}, {"reasoning_effort": "low"}),
        ({"max_tokens": 7}, {"thinking_token_budget": 7}),
        ({"enabled": False}, {"reasoning_effort": "none"}),
        ({"enabled": True}, {}),
    ):
        prompts, budgets = [], []
        for field in ({"reasoning": given}, ours):
            prompts.append(chat_prompt(server, **field))
            budgets.append(server.requests[-1].sampling.thinking)
        assert (prompts[0], budgets[0]) == (prompts[1], budgets[1])
    server.answer = say(*ANSWER)
    (choice,) = taken(server, CHAT, {"messages": [HI], "reasoning": {"exclude": True}})["choices"]
    assert "reasoning_content" not in choice["message"]
    refused = server.post(CHAT, {"messages": [HI], "reasoning": {"effort": "low"}, "reasoning_effort": "low"})
    assert refused.json()["error"]["param"] == "reasoning"


def test_a_schema_beside_the_type_of_the_answer(server: HttpServer) -> None:
    grammars = []
    for format in (
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
    ):
        chat_prompt(server, response_format=format)
        grammars.append(server.requests[-1].sampling.grammar)
    assert grammars[0] == grammars[1] == grammars[2] != ""


def test_minus_one_is_no_bound(server: HttpServer) -> None:
    server.answer = say("A")
    for path, name, body in (
        (CHAT, "max_tokens", {"messages": [HI]}),
        (CHAT, "max_completion_tokens", {"messages": [HI]}),
        ("/v1/completions", "max_tokens", {"prompt": "Hi"}),
    ):
        taken(server, path, body | {name: -1})
        request = server.requests[-1]
        assert request.sampling.max_tokens == CONTEXT - len(tokens_of(request))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_grammars_under_other_servers_names(server: HttpServer, path: str) -> None:
    body = {"messages": [HI]} if path == CHAT else {"prompt": "Hi"}
    for name, value, ours in (
        ("regex", "[0-9]+", "guided_regex"),
        ("ebnf", 'root ::= "yes"', "guided_grammar"),
        ("grammar", 'root ::= "yes"', "guided_grammar"),
        ("json_schema", json.dumps(SCHEMA), "guided_json"),
        ("json_schema", SCHEMA, "guided_json"),
    ):
        grammars = []
        for field in ({name: value}, {ours: value}):
            taken(server, path, body | field | {"max_tokens": 1})
            grammars.append(server.requests[-1].sampling.grammar)
        assert grammars[0] == grammars[1] != ""
        taken(server, path, body | {name: "", "max_tokens": 1})
        assert server.requests[-1].sampling.grammar == ""
        refused = server.post(path, body | {name: value, "guided_choice": ["a"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_tokens_as_llama_server_gives_them(server: HttpServer) -> None:
    text = "Déjà \U0001f600!"
    ids = server.tokenizer.encode(text)
    assert taken(server, "/tokenize", {"content": text})["tokens"] == ids
    pieces = taken(server, "/tokenize", {"content": text, "with_pieces": True, "add_special": True})["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    whole = b"".join(
        p.encode() if isinstance(p, str) else bytes(p) for p in (piece["piece"] for piece in pieces)
    )
    assert whole.decode() == text
    assert taken(server, "/detokenize", {"tokens": ids})["content"] == text
    refused = server.post("/tokenize", {"content": "a", "prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_the_template_alone(server: HttpServer) -> None:
    tools = {"tools": [WEATHER], "reasoning_effort": "none"}
    prompt = chat_prompt(server, **tools)
    assert taken(server, "/apply-template", {"messages": [HI]} | tools) == {"prompt": prompt}
    assert len(server.requests) == 1, "nothing is generated"
    assert server.post("/apply-template", {}).json()["error"]["param"] == "messages"


def messages(server: HttpServer, **body: Any) -> Any:
    return server.post("/v1/messages", {"model": NAME, "max_tokens": 1, "messages": [HI]} | body)


def dropped(server: HttpServer) -> float:
    metrics = server.metrics()
    return sum(value for name, value in metrics.items() if "unknown_request_fields_total" in name)


def test_documents_and_search_results_are_text(server: HttpServer) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Foxes jump."}
    block = {"type": "document", "source": plain, "title": "Foxes", "citations": {"enabled": True}}
    found = {
        "type": "search_result",
        "source": "http://foxes",
        "title": "Dogs",
        "content": [{"type": "text", "text": "Dogs lie."}],
    }
    result = {"type": "tool_result", "tool_use_id": "x", "content": [found]}
    nested = {"type": "document", "source": {"type": "content", "content": "Cats sit."}}
    user = {"role": "user", "content": [result, block, nested, {"type": "text", "text": "Who?"}]}
    assert messages(server, messages=[user]).status_code == 200
    prompt = prompt_of(server)
    assert "<document>\n<title>Foxes</title>\nFoxes jump.\n</document>\n<document>\nCats sit." in prompt
    assert "<source>http://foxes</source>\n<title>Dogs</title>\nDogs lie.\n</search_result>" in prompt
    by_url = {"type": "document", "source": {"type": "url", "url": "https://foxes/a.pdf"}}
    refused = messages(server, messages=[{"role": "user", "content": [by_url]}])
    assert refused.status_code == 400
    assert "the type 'url' is not supported" in refused.json()["error"]["message"]


def test_tools_that_a_search_finds_are_in_the_prompt(server: HttpServer) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA, "defer_loading": True, "input_examples": [PARIS]}
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [found]}]}
    assert messages(server, tools=[tool], messages=[HI, result]).status_code == 200
    prompt = prompt_of(server)
    assert '"description": "Examples of its input:\\n{\\"city\\": \\"Paris\\"}"' in prompt
    assert "<tool_response>\nweather\n</tool_response>" in prompt


def test_thinking_that_is_not_shown(server: HttpServer) -> None:
    server.answer = say("<think>", "\nHm.\n", "</think>", "\n\nA fox.")
    for display, kinds in (("omitted", ["text"]), ("summarized", ["thinking", "text"])):
        shown = messages(server, thinking={"type": "adaptive", "display": display}).json()["content"]
        assert [block["type"] for block in shown] == kinds


def test_tools_that_run_at_anthropic_are_left_out(server: HttpServer) -> None:
    before = dropped(server)
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    tools = [search, {"name": "weather", "input_schema": SCHEMA}]
    assert messages(server, tools=tools).status_code == 200
    assert '"name": "weather"' in prompt_of(server)
    assert "web_search" not in prompt_of(server)
    assert dropped(server) == before + 1
    forced = messages(server, tools=[search], tool_choice={"type": "any"})
    assert forced.status_code == 400
