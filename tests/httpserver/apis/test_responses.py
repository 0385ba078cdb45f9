"""/v1/responses through the official client: scripted answers over real messages and sockets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.chats.scripted_answers import ANSWER, PARIS, REASONING_TOKENS, RESPONSES_TOOLS, prompt_of
from tests.support.clients.official_clients import openai_client
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, say, tokens_of

if TYPE_CHECKING:
    from openai import OpenAI


_as_new = as_new(say(*ANSWER))


@pytest.fixture(scope="module")
def openai(server: HttpServer) -> OpenAI:
    return openai_client(server.url)


def test_responses(openai: OpenAI) -> None:
    response = openai.responses.create(
        model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS, include=["reasoning.encrypted_content"]
    )
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    thought, message, weather, now = response.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or []] == ["Let me see."]
    assert response.output_text == "Here you are."
    assert message.type == "message"
    assert weather.type == now.type == "function_call"
    assert (weather.name, json.loads(weather.arguments)) == ("weather", PARIS)
    assert now.arguments == "{}"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == REASONING_TOKENS


def test_responses_stream(openai: OpenAI) -> None:
    with openai.responses.stream(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == 4
    assert types.count("response.function_call_arguments.delta") >= 4
    whole = openai.responses.create(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS)

    def gist(items: Any) -> list[Any]:
        kept = ("type", "status", "arguments", "name", "summary")
        texts = [part.text for item in items for part in getattr(item, "content", None) or []]
        return texts + [{key: item.to_dict().get(key) for key in kept} for item in items]

    assert gist(response.output) == gist(whole.output)


@pytest.mark.parametrize(
    "fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}], ids=["include", "top"]
)
def test_logprobs_of_every_token_of_the_text(server: HttpServer, fields: dict[str, Any]) -> None:
    """Also of tokens whose text comes with a later one; none of the thought's."""
    server.answer = say("<think>", "Hm", "</think>", "One", "", "\u00e9", " two")
    body = {"input": "Hi", "max_output_tokens": 16} | fields
    (_, message) = server.post("/v1/responses", body).json()["output"]
    (part,) = message["content"]
    assert part["text"] == "One\u00e9 two"
    assert len(part["logprobs"]) == 4
    top = fields.get("top_logprobs", 0)
    assert all(len(entry["top_logprobs"]) == top for entry in part["logprobs"])
    with httpx.stream("POST", server.url + "/v1/responses", json=body | {"stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [len(entries) for entries in deltas] == [1, 2, 1]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


def test_a_response_goes_on_from_another(server: HttpServer, openai: OpenAI) -> None:
    first = openai.responses.create(
        model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS, instructions="Be brief."
    )
    server.answer = say("It rains.")
    call = next(item for item in first.output if item.type == "function_call")
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    second = openai.responses.create(
        model=NAME, input=results, previous_response_id=first.id, tools=RESPONSES_TOOLS
    )
    prompt = prompt_of(server)
    for part in (
        "<|im_start|>user\nWho jumps?<|im_end|>",
        'Here you are.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "<think>\nLet me see.\n</think>",
        "<tool_response>\nRain.\n</tool_response>",
    ):
        assert part in prompt
    assert "Be brief." not in prompt  # instructions are not taken over
    third = openai.responses.create(model=NAME, input="Thanks.", previous_response_id=second.id, store=False)
    assert "It rains." in prompt_of(server)
    assert "Who jumps?" in prompt_of(server)
    assert httpx.get(f"{server.url}/v1/responses/{third.id}").status_code == 404  # not stored
    assert openai.responses.retrieve(second.id).output_text == "It rains."
    (item,) = openai.responses.input_items.list(second.id).data
    assert item.type == "function_call_output"
    openai.responses.delete(first.id)
    broken = server.post("/v1/responses", {"input": "x", "previous_response_id": second.id})
    assert broken.status_code == 400
    assert broken.json()["error"]["code"] == "previous_response_not_found"
    assert first.id in broken.json()["error"]["message"]
    assert broken.json()["error"]["param"] == "previous_response_id"


def test_a_conversation_without_the_store(server: HttpServer, openai: OpenAI) -> None:
    """Output items go back as they came, the thought in its opaque form."""
    first = openai.responses.create(
        model=NAME, input="Who?", tools=RESPONSES_TOOLS, store=False, include=["reasoning.encrypted_content"]
    )
    items: list[Any] = [{"role": "user", "content": "Who?"}]
    for item in first.output:
        plain = item.to_dict()
        if plain["type"] == "reasoning":
            plain.pop("content")
        items.append(plain)
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "Noon."})
    openai.responses.create(model=NAME, input=items, tools=RESPONSES_TOOLS, store=False)
    prompt = prompt_of(server)
    assert "<think>\nLet me see.\n</think>\n\nHere you are." in prompt
    assert prompt.count("<tool_call>\n{") == 2 + 1  # and the one in the template's own words
    assert "Noon." in prompt


def test_input_items_come_in_pages(server: HttpServer, openai: OpenAI) -> None:
    server.answer = say("Fine.")
    given: Any = [{"role": "user", "content": f"Message {i}"} for i in range(7)]
    response = openai.responses.create(model=NAME, input=given)
    pages = openai.responses.input_items.list(response.id, limit=3, order="asc")
    texts = [item.content[0].text for item in pages if item.type == "message"]  # type: ignore[union-attr]
    assert texts == [f"Message {i}" for i in range(7)]
    newest = openai.responses.input_items.list(response.id, limit=1).data[0]
    assert newest.content[0].text == "Message 6"  # type: ignore[union-attr, index]


def test_responses_that_end_early_or_badly(server: HttpServer, openai: OpenAI) -> None:
    server.answer = say("Half an", reason="length")
    response = openai.responses.create(model=NAME, input="x", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]

    from moeserve.messages.schema import RequestError, TextItem, TextOut

    def fail(server: HttpServer, request: Any) -> None:
        server.send(TextOut([TextItem(request.id, "Half", [5])]))
        server.send(RequestError(request.id, 500, "the engine is out of breath"))

    server.answer = fail
    events = list(openai.responses.create(model=NAME, input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "out of breath" in events[-1].response.error.message
    with pytest.raises(Exception, match="out of breath"):
        openai.responses.create(model=NAME, input="x")


def test_input_tokens_are_counted(server: HttpServer, openai: OpenAI) -> None:
    counted = openai.responses.input_tokens.count(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS)
    openai.responses.create(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS)
    assert counted.input_tokens == len(tokens_of(server.requests[-1]))
