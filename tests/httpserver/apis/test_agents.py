"""What agents send beyond plain chat: Codex's tools, references to items, Claude Code's headers, tools that may be
called, and tools whose schemas no grammar can hold an answer to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest

from tests.support.chats.codex_calls import CALLS, CODEX_TOOLS, OBJECT, OUTPUTS
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.official_clients import openai_client
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, Answer, HttpServer, http_server, say, tokens_of


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=4096) as running:
        yield running


_as_new = as_new(say("Fine."))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: dict[str, Any]) -> Answer:
    text = json.dumps({"name": name, "arguments": arguments})
    return say("<tool_call>\n", text, "\n</tool_call>")


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS, ids=[one[0] for one in CALLS])
def test_codex_tools_are_functions_and_their_calls_codex_items(
    server: HttpServer, name: str, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    server.answer = call(name, arguments)
    asked: dict[str, Any] = {"input": "Go.", "tools": CODEX_TOOLS, "store": True}
    answer = server.post("/v1/responses", asked)
    (item,) = answer.json()["output"]
    assert {key: item[key] for key in expected} == expected
    prompt = prompt_of(server)
    assert "start: BEGIN" in prompt
    assert "web_search" not in prompt
    events = server.post("/v1/responses", asked | {"stream": True}).text.split("\n\n")
    last = json.loads(events[-2].partition("data: ")[2])
    (streamed,) = last["response"]["output"]
    assert {key: streamed[key] for key in expected} == expected
    done = next(event for event in events if event.startswith("event: response.output_item.done"))
    assert json.loads(done.partition("data: ")[2])["item"] == streamed
    # The next turn, with the item itself and with a reference to it.
    outcome, read = OUTPUTS.get(name, ({"output": "It worked."}, "It worked."))
    result = {"type": f"{item['type']}_output", "call_id": item["call_id"], **outcome}
    server.answer = say("Fine.")
    prompts = []
    sorted_by_client = json.loads(json.dumps(item, sort_keys=True))
    for sent in (item, sorted_by_client, {"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        items = [{"role": "user", "content": "Go."}, sent, result]
        assert server.post("/v1/responses", {"input": items, "tools": CODEX_TOOLS}).status_code == 200
        prompts.append(prompt_of(server))
    assert len(set(prompts)) == 1
    assert json.dumps({"name": name, "arguments": arguments}) in prompts[0]
    assert f"<tool_response>\n{read}\n</tool_response>" in prompts[0]


@pytest.mark.parametrize("name", ["local_shell", "shell", "apply_patch"])
@pytest.mark.parametrize("arguments", ["", "[]", '{"commands": "ls", "command": "ls", "type": 5}', "{"])
def test_whatever_the_model_writes_a_known_tools_call_has_its_form(
    server: HttpServer, name: str, arguments: str
) -> None:
    server.answer = say("<tool_call>\n", f'{{"name": "{name}", "arguments": {arguments}}}', "\n</tool_call>")
    asked = {"model": NAME, "input": "Go.", "tools": CODEX_TOOLS}
    found = openai_client(server.url).responses.parse(**asked)
    for item in found.output:
        if item.type == "apply_patch_call":
            assert item.operation.type == "update_file"
        elif item.type == "shell_call":
            assert item.action.commands in ([], ["ls"])


def test_a_custom_call_streams_its_input(server: HttpServer) -> None:
    server.answer = call("patch", {"input": "text"})
    with openai_client(server.url).responses.stream(model=NAME, input="Go.", tools=CODEX_TOOLS) as stream:
        events = [event.to_dict() for event in stream]
    assert [event["delta"] for event in events if str(event["type"]).endswith("input.delta")] == ["text"]
    assert [event["input"] for event in events if str(event["type"]).endswith("input.done")] == ["text"]


def test_references_that_lead_nowhere(server: HttpServer) -> None:
    answer = server.post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_x"}]})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "input"
    first = server.post("/v1/responses", {"input": "Hi", "store": False}).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert server.post("/v1/responses", {"input": [reference]}).status_code == 404


def test_claude_codes_billing_line_is_no_part_of_the_prompt(server: HttpServer) -> None:
    prompts = []
    for line in (
        "x-anthropic-billing-header: cc_version=2; cch=1a2b3;",
        "x-anthropic-billing-header: cch=9;",
    ):
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You help."}]
        body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
        for given in (system, f"{line}\nYou help."):
            assert server.post("/v1/messages", body | {"system": given}).status_code == 200
            prompts.append(prompt_of(server))
    assert len(set(prompts)) == 1
    assert prompts[0].startswith("<|im_start|>system\nYou help.<|im_end|>")


def test_ten_turns_of_claude_code_share_each_prompt_with_the_next(server: HttpServer) -> None:
    """So that the prefix cache has all of it: the template keeps what the model thought between its calls."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    prompts: list[list[int]] = []
    for turn in range(10):
        text = json.dumps({"name": "Bash", "arguments": {"command": f"echo {turn}"}})
        server.answer = say("<think>", "\nHm.\n", "</think>", "\n\n<tool_call>\n", text, "\n</tool_call>")
        lines = [f"x-anthropic-billing-header: cch={turn}a;", "You help. " + "word " * 300]
        body = {
            "model": NAME,
            "max_tokens": 100,
            "thinking": {"type": "adaptive"},
            "system": [{"type": "text", "text": line} for line in lines],
            "messages": messages,
            "tools": [{"name": "Bash", "input_schema": OBJECT}],
        }
        content = server.post("/v1/messages", body).json()["content"]
        prompts.append(tokens_of(server.requests[-1]))
        (used,) = (block["id"] for block in content if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used, "content": f"{turn}"}
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": OBJECT}} for name in ("a", "b")]
FLAT_TOOLS: Any = [{"type": "function", "name": name, "parameters": OBJECT} for name in ("a", "b")]
CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 5}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_stay_in_the_prompt_and_bound_the_calls(server: HttpServer, mode: str) -> None:
    name = {"type": "function", "function": {"name": "b"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [name]}}
    assert server.post("/v1/chat/completions", CHAT | {"tool_choice": choice}).status_code == 200
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "b"}]}
    body = {"input": "Hi", "tools": FLAT_TOOLS, "tool_choice": flat, "max_output_tokens": 5}
    assert server.post("/v1/responses", body).status_code == 200
    for request in server.requests:
        assert '\\"b\\"' in request.sampling.grammar
        assert '\\"a\\"' not in request.sampling.grammar
    assert '"name": "a"' in prompt_of(server)
    name["function"] = {"name": "c"}
    refused = server.post("/v1/chat/completions", CHAT | {"tool_choice": choice})
    assert "there is no tool 'c'" in refused.json()["error"]["message"]


def test_a_forced_call_goes_before_a_format(server: HttpServer) -> None:
    """Which is that of a text, and there will be none."""
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"unlike": {}}}}
    body = {"input": "Hi", "tools": FLAT_TOOLS, "text": {"format": schema}, "max_output_tokens": 5}
    for choice in ({"type": "function", "name": "a"}, "required"):
        assert server.post("/v1/responses", body | {"tool_choice": choice}).status_code == 200
        assert "unlike" not in server.requests[-1].sampling.grammar
    assert server.post("/v1/responses", body).status_code == 200
    assert "unlike" in server.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "string", "pattern": "^(?=.*a).{3}$"},
        {"type": "string", "pattern": r"^(a)\1$"},
        {"type": "any"},
        {"$ref": "https://x.example/elsewhere"},
        {"type": "object", "patternProperties": {"^(?!x)": {}}},
    ],
    ids=lambda schema: next(reversed(schema)),
)
def test_a_required_call_with_what_no_grammar_holds(server: HttpServer, schema: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"pattern": schema}}}
    body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    for _ in range(2):
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-moeserve-relaxed-schemas"] == "tools"
    assert "pattern" in server.requests[-1].sampling.grammar  # the property of that name
    body["tools"] = [{"type": "function", "function": function | {"strict": True}}]
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_grammar"
    assert refused.json()["error"]["message"].startswith('tools: tool "f" at #/properties/pattern: ')


_UNIQUE: dict[str, Any] = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
}


def _answers_in(schema: dict[str, Any], *, strict: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    named = {"name": "s", "schema": schema, "strict": strict}
    yield "/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": named}}
    yield "/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema"} | named}}
    if strict:
        yield "/v1/chat/completions", CHAT | {"guided_json": schema}
    else:
        yield "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object", "schema": schema}}
        yield "/api/chat", CHAT | {"model": NAME, "stream": False, "format": schema}
        yield "/api/generate", {"model": NAME, "prompt": "Hi", "stream": False, "format": schema}
        yield "/completion", {"prompt": "Hi", "json_schema": schema}


def test_an_answer_that_is_not_strict_keeps_what_a_grammar_can_express(server: HttpServer) -> None:
    for path, body in _answers_in(_UNIQUE, strict=False):
        answer = server.post(path, body)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-moeserve-relaxed-schemas"] in body | {"text.format.schema": 0}
        assert "ids" in server.requests[-1].sampling.grammar
    for path, body in _answers_in(_UNIQUE, strict=True):
        refused = server.post(path, body)
        assert refused.status_code == 400
        assert "at #/properties/ids: uniqueItems cannot be enforced" in refused.text
    impossible = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
    for path, body in _answers_in(impossible, strict=False):
        assert server.post(path, body).status_code == 400
    mistaken = {"type": "object", "properties": {"a": {"type": "strng"}}}
    for path, body in _answers_in(mistaken, strict=False):
        assert "strng" in server.post(path, body).text


def test_the_error_of_a_strict_tool_among_others(server: HttpServer) -> None:
    """Whose schema, where and what; nothing of those that are not strict and have the same, nor of the grammar."""
    parameters = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
    loose, strict = (
        {"name": name, "parameters": parameters, "strict": name == "beta"} for name in ("alpha", "beta")
    )
    for choice, functions in product(("auto", "required"), ([loose, strict], [strict, loose])):
        tools = [{"type": "function", "function": function} for function in functions]
        answer = server.post("/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": choice})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message == 'tools: tool "beta" at #/properties/ids: uniqueItems cannot be enforced'
    flat = [{"type": "function", **function} for function in (loose, strict)]
    assert "beta" in server.post("/v1/responses", {"input": "Hi", "tools": flat}).json()["error"]["message"]


@pytest.mark.parametrize("schema", [{"type": "string", "format": "phone-number"}, {"uniqueItems": False}])
def test_ordinary_schemas_are_not_relaxed(server: HttpServer, schema: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    tools = [{"type": "function", "function": function}]
    answer = server.post("/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": "required"})
    assert answer.status_code == 200
    assert "x-moeserve-relaxed-schemas" not in answer.headers


INCLUDES = [
    "one_that_is_new.results",
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results"),
]


def test_parts_of_hosted_tools_may_be_asked_for(server: HttpServer) -> None:
    """The tools are dropped, so that no answer has any."""
    body = {"model": NAME, "input": "Hi", "include": INCLUDES}
    assert server.post("/v1/responses", body).json()["output"][0]["type"] == "message"
    refused = server.post("/v1/responses", body | {"include": [5]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "include.0"


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
def test_a_summary_that_is_asked_for_is_the_reasoning_itself(server: HttpServer, summary: str) -> None:
    server.answer = say("<think>", "Hm.", "</think>", "Rain.")
    body = {"model": NAME, "input": "Hi", "reasoning": {"effort": "high", "summary": summary}}
    thought, _ = server.post("/v1/responses", body).json()["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]


@pytest.mark.parametrize("display", ["updates", "summarized", "full"])
def test_thinking_is_shown_unless_it_is_omitted(server: HttpServer, display: str) -> None:
    """Claude Code's newest asks for "updates", which no documentation has."""
    server.answer = say("<think>", "Hm.", "</think>", "Rain.")

    def kinds(display: str) -> list[str]:
        thinking = {"type": "adaptive", "display": display}
        body = {"model": NAME, "max_tokens": 9, "messages": [user("Hi")], "thinking": thinking}
        answer = server.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        return [block["type"] for block in answer.json()["content"]]

    assert kinds(display) == ["thinking", "text"]
    assert kinds("omitted") == ["text"]


def test_a_conversation_that_began_at_anthropics_goes_on_here(server: HttpServer) -> None:
    """Its encrypted thinking is no part of the prompt."""

    def prompt(*thoughts: Any) -> str:
        said = [*thoughts, {"type": "text", "text": "Hello."}]
        turns = [user("Hi"), {"role": "assistant", "content": said}, user("Go on")]
        body = {"model": NAME, "max_tokens": 4, "messages": turns}
        assert server.post("/v1/messages", body).status_code == 200
        return prompt_of(server)

    assert prompt({"type": "redacted_thinking", "data": "EmwKAhgBEgy3"}) == prompt()


@pytest.mark.parametrize("encrypted", ["gAAAAABo_-fY", "/////w=="], ids=["no base64", "no text"])
def test_a_conversation_that_began_at_openais_goes_on_here(server: HttpServer, encrypted: str) -> None:
    """The same; and what it asked for there changes nothing here."""

    def prompt(*thoughts: Any) -> str:
        said = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello."}],
        }
        body = {"model": NAME, "input": [user("Hi"), *thoughts, said, user("Go on")]}
        answer = server.post("/v1/responses", body | {"truncation": "auto", "max_tool_calls": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["truncation"] == "disabled"
        return prompt_of(server)

    assert prompt({"type": "reasoning", "summary": [], "encrypted_content": encrypted}) == prompt()


@pytest.mark.parametrize("arguments", [{}, {"city": "Zürich", "days": [1, {"deep": None}]}])
def test_arguments_may_be_an_object(server: HttpServer, arguments: dict[str, Any]) -> None:
    def prompt(given: Any) -> str:
        called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
        result = {"role": "tool", "tool_call_id": "a", "content": "5"}
        turns = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [called]}, result]
        assert server.post("/v1/chat/completions", {"model": NAME, "messages": turns}).status_code == 200
        return prompt_of(server)

    assert prompt(arguments) == prompt(json.dumps(arguments))
    nested: Any = 1
    for _ in range(40):
        nested = {"a": nested}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": nested}
    refused = server.post("/v1/responses", {"model": NAME, "input": [user("Hi"), call]})
    assert refused.status_code == 400
    assert "nested too deep" in refused.json()["error"]["message"]
