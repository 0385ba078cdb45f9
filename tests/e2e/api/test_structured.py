"""Answers of a certain form from the real server: the tiny model prefers nothing, so only the grammar makes them
what they are."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conftest import IS_BATCH_INVARIANT, TINY_MODEL
from tests.e2e.api.random_schemas import SchemaMaker
from tests.e2e.completions import at_once, completion, is_empty, streamed
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

AT_ONCE = 8


def answer(server: Server, **body: Any) -> str:
    defaults = {"prompt": "Answer:", "temperature": 1.0, "seed": 5, "max_tokens": 1500, "ignore_eos": False}
    choice = completion(server, **defaults | body)
    assert choice["finish_reason"] == "stop", choice["text"]
    return str(choice["text"])


def validate(text: str, schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@pytest.mark.parametrize(("seed", "count"), [(4, 16), pytest.param(1, 200, marks=pytest.mark.slow)])
def test_every_random_schema_yields_json_that_validates(server: Server, seed: int, count: int) -> None:
    maker = SchemaMaker(seed)
    schemas = [maker.schema() for _ in range(count)]

    def ask(schema: dict[str, Any]) -> str:
        return answer(server, guided_json=schema)

    for start in range(0, count, AT_ONCE):
        batch = schemas[start : start + AT_ONCE]
        for schema, text in zip(batch, at_once(ask, batch), strict=True):
            validate(text, schema)


@pytest.mark.parametrize(("seed", "count"), [(5, 8), pytest.param(6, 100, marks=pytest.mark.slow)])
def test_every_random_schema_holds_for_responses_and_tools(server: Server, seed: int, count: int) -> None:
    """In chat: the same schema as the answer's, and as the parameters of a tool that must be called."""
    maker = SchemaMaker(seed)
    schemas = [schema for _ in range(2 * count) if (schema := maker.schema()).get("type") == "object"][:count]
    common = {"messages": [{"role": "user", "content": "Well?"}], "temperature": 1.0}
    common["chat_template_kwargs"] = {"enable_thinking": False}

    def ask(schema: dict[str, Any]) -> list[str]:
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        tool = {"type": "function", "function": {"name": "form", "parameters": schema}}
        texts = []
        for wish in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
            body = common | wish | {"seed": 3, "parallel_tool_calls": False}
            (choice,) = server.post("/v1/chat/completions", body)["choices"]
            assert choice["finish_reason"] in ("stop", "tool_calls"), choice
            calls = choice["message"].get("tool_calls") or []
            texts += [call["function"]["arguments"] for call in calls] or [choice["message"]["content"]]
        return texts

    for start in range(0, len(schemas), AT_ONCE):
        batch = schemas[start : start + AT_ONCE]
        for schema, texts in zip(batch, at_once(ask, batch), strict=True):
            assert len(texts) == 2
            for text in texts:
                validate(text, schema)


def test_schemas_with_white_space_and_greedy_models_validate_too(server: Server) -> None:
    maker = SchemaMaker(seed=2, compact=False)
    for temperature in (0.0, 1.0):
        for _ in range(5):
            schema = maker.schema()
            validate(answer(server, guided_json=schema, temperature=temperature), schema)


PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "age": {"type": "integer", "title": "Age"},
        "kind": {"enum": ["new", "old"]},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/Pet"}, "maxItems": 2},
        "is_real": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
    },
    "required": ["age", "kind", "pets"],
    "$defs": {"Pet": {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}},
}
MOST_TOKENS = 1200  # numbers of 18 digits, and 20 blanks at each end of a line


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_an_answer_ends_whatever_the_model_prefers(server: Server, temperature: float) -> None:
    """The schema as pydantic writes it, without additionalProperties, in each API: this model prefers nothing."""
    format = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": PERSON}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": PERSON}}]
    free = {"messages": [{"role": "user", "content": "Who?"}], "temperature": temperature}
    chat = free | {"chat_template_kwargs": {"enable_thinking": False}, "seed": 1}
    call = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    for wish in ({"response_format": format}, call):
        (choice,) = server.post("/v1/chat/completions", chat | wish | {"max_tokens": MOST_TOKENS})["choices"]
        assert choice["finish_reason"] in ("stop", "tool_calls")
        calls = choice["message"].get("tool_calls")
        validate(calls[0]["function"]["arguments"] if calls else choice["message"]["content"], PERSON)
    name = httpx.get(server.base_url + "/v1/models").json()["data"][0]["id"]
    options = {"temperature": temperature, "num_predict": MOST_TOKENS, "seed": 1}
    ollama = {"model": name, "stream": False, "think": False, "format": PERSON, "options": options}
    body = server.post("/api/chat", ollama | {"messages": free["messages"]})
    assert body["done_reason"] == "stop"
    validate(body["message"]["content"], PERSON)
    body = server.post(
        "/completion",
        {"prompt": "Who?", "json_schema": PERSON, "n_predict": MOST_TOKENS, "temperature": temperature},
    )
    assert body["stop_type"] == "eos"
    validate(body["content"], PERSON)


def test_json_objects_regexes_choices_and_grammars(server: Server) -> None:
    assert re.fullmatch(r"\d{2}-[x-z]+!", answer(server, guided_regex=r"\d{2}-[x-z]{1,9}!"))
    options = ["yes", "no, thanks", "perhaps\nlater"]
    seen = {answer(server, guided_choice=options, seed=seed) for seed in range(12)}
    assert seen <= set(options)
    assert len(seen) > 1
    assert re.fullmatch(r"(ab)+c", answer(server, guided_grammar='start: ("ab")~1..5 "c"'))
    assert re.fullmatch(
        r"[0-9]+\+[0-9]+", answer(server, guided_grammar='root ::= [0-9]{1,5} "+" [0-9]{1,5}')
    )
    # Without a schema nothing bounds an object; a bias towards its end does.
    (brace,) = server.post("/tokenize", {"prompt": "}"})["tokens"]
    text = answer(server, response_format={"type": "json_object"}, logit_bias={str(brace): 100})
    assert isinstance(json.loads(text), dict)


def test_streams_and_choices_are_constrained_as_well(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "prompt": "Answer:",
        "guided_json": schema,
        "max_tokens": 400,
        "temperature": 1.0,
        "ignore_eos": False,
    }
    pieces: dict[int, str] = {}
    for event in streamed(server, n=3, **body):
        for choice in event["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
    assert len(pieces) == 3
    for text in pieces.values():
        validate(text, schema)


@pytest.mark.cpu_engine("a GPU's results depend on how many rows a step has")
def test_the_same_answer_alone_and_in_a_crowd(server: Server) -> None:
    maker = SchemaMaker(seed=3)
    schemas = [maker.schema() for _ in range(4)]

    def ask(index: int) -> str:
        return answer(server, guided_json=schemas[index], seed=index)

    alone = [ask(index) for index in range(4)]
    free = [{"prompt": f"Tell {i}", "max_tokens": 60, "seed": i, "temperature": 1.0} for i in range(2)]
    texts = [completion(server, **body)["text"] for body in free]

    def either(index: int) -> str:
        return ask(index) if index < 4 else str(completion(server, **free[index - 4])["text"])

    assert at_once(either, range(6)) == alone + texts


@pytest.mark.slow
def test_a_grammar_outlives_a_pause() -> None:
    """Short answers make the router expect more of them; then long ones overrun a small pool."""
    schema = {
        "type": "array",
        "items": {"enum": ["alpha", "beta", "gamma"]},
        "minItems": 60,
        "maxItems": 60,
        "x-guidance": {"whitespace_flexible": False},
    }
    small_pool = ("--max-total-tokens", "600", "--max-model-len", "500", "--max-num-seqs", "8")
    with running_server(TINY_MODEL, *small_pool) as server:
        for _ in range(40):
            answer(server, guided_choice=["yes"], max_tokens=400)

        def ask(index: int) -> str:
            return answer(server, prompt=f"List {index}:", guided_json=schema, seed=index, max_tokens=450)

        crowd = at_once(ask, range(6))
        assert within(30, lambda: server.metrics()["moeserve:num_preemptions_total"] > 0)
        for index, text in enumerate(crowd):
            validate(text, schema)
            assert text == ask(index) or not IS_BATCH_INVARIANT


def test_a_grammar_that_cannot_be_followed_fails_alone(server: Server) -> None:
    """It compiles, and its second token needs more than llguidance's limits allow."""
    hopeless = {"prompt": "x", "max_tokens": 50, "guided_grammar": 'start: "b" ("a"~1000000)~1000000'}
    body = {"prompt": "Tell", "max_tokens": 200, "seed": 1, "temperature": 1.0}
    expected = completion(server, **body)["text"]

    def either(index: int) -> Any:
        if index == 0:
            return completion(server, **body)["text"]
        return httpx.post(server.base_url + "/v1/completions", json=hopeless, timeout=60)

    text, *failures = at_once(either, range(4))
    assert text == expected or not IS_BATCH_INVARIANT
    for response in failures:
        assert response.status_code == 400
        assert "cannot be followed any further" in response.json()["error"]["message"]
    assert within(30, lambda: is_empty(server))


@pytest.mark.slow
def test_hostile_schemas_are_refused_and_harm_nobody(server: Server) -> None:
    """Each would run for ever or take all memory; the neighbour's answer is what it is alone."""
    hostile: list[dict[str, Any]] = [
        {"type": "integer", "multipleOf": 99999989},
        {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}b)*$"} for i in range(20)]},
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(20)
            ]
        },
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}},
    ]
    body = {"prompt": "Tell", "max_tokens": 300, "seed": 1, "temperature": 1.0}
    expected = completion(server, **body)["text"]

    def either(index: int) -> Any:
        if index == 0:
            return completion(server, **body)["text"]
        asked = {"prompt": "x", "guided_json": hostile[index - 1], "max_tokens": 5}
        return httpx.post(server.base_url + "/v1/completions", json=asked, timeout=60)

    text, *refusals = at_once(either, range(1 + len(hostile)))
    assert text == expected
    assert [response.status_code for response in refusals] == [400] * len(hostile)
    assert completion(server, **body)["text"] == expected


@pytest.mark.parametrize("budget", [0, 1, 12])
def test_thoughts_keep_to_their_budget_and_the_answer_to_its_form(server: Server, budget: int) -> None:
    ids = {tag: server.post("/tokenize", {"prompt": tag})["tokens"][0] for tag in ("<think>", "</think>")}
    asked = {
        "messages": [{"role": "user", "content": "Well?"}],
        "guided_choice": ["yes", "no"],
        "chat_template_kwargs": {"thinking_budget": budget},
        "logit_bias": {str(ids["<think>"]): 100, str(ids["</think>"]): -100},
        "max_tokens": 100,
    }
    body = server.post("/v1/chat/completions", asked)
    (choice,) = body["choices"]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"
    tokens = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    # The opening tag, the thought, a line end and the closing tag; with 0 there is no thought at all.
    assert tokens == (budget + 3 if budget else 0)
    assert ("reasoning" in choice["message"]) == (budget > 0)
